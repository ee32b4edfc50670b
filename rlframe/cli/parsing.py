"""Parse arguments to dataclasses with tyro. Errors are one sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from rlframe.cli.help import OptionField, format_help, option_fields
from rlframe.errors import UsageError, suggest
from rlframe.programs.options.fields import option, takes_function

T = TypeVar("T")
# A function (fields, prog, description, width) that returns the text of `--help`.
HelpFormat = Callable[[Sequence[OptionField], str, str, int], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """The option that all commands have.

    `main.py` searches the raw arguments for this option, because an error may occur before they are parsed.
    """

    traceback: bool = option(False, multi_run="each", group="Logging")  # Print the traceback of an error.


def parse(
    options: type[T],
    arguments: Sequence[str],
    prog: str,
    description: str,
    *,
    default: Any = None,
    describe_owner: Callable[[str], str] = lambda name: "",
    help_format: HelpFormat = format_help,
) -> T:
    """Parse the command line to an instance of `options`.

    Args:
        options: a dataclass for tyro.
        arguments: arguments after the name of the command.
        prog: name of the command in help and errors.
        description: first lines of the help.
        default: an instance of `options` with all defaults.
        describe_owner: for an unknown option (`--x`), returns a sentence that names the agents or settings that have
            this option. It returns "" if nothing has this option.
        help_format: a function that returns the text of `--help`.

    Raises:
        UsageError: an option is unknown or its value is invalid.
        SystemExit: `--help` was given, and the help is printed.
    """
    described = options if default is None else default
    if {"-h", "--help"} & {*arguments}:
        print(
            help_format(list(option_fields(described)), prog, description, shutil.get_terminal_size((100, 24)).columns)
        )
        raise SystemExit(0)
    errors = io.StringIO()
    extra = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(errors):
            parsed, unknown = tyro.cli(
                options,
                args=list(arguments),
                prog=prog,
                description=description,
                return_unknown_args=True,
                config=(tyro.conf.SuppressFixed,),
                registry=_registry(),
                **extra,
            )
    except SystemExit:
        raise UsageError(f"{_sentence(errors.getvalue())} See `{prog} --help`.") from None
    if unknown:
        flags = [flag for field in option_fields(described) for flag in field.flags]
        raise UsageError(_unknown(unknown, flags, prog, describe_owner))
    return parsed


def raw_option_values(arguments: Sequence[str]) -> dict[str, str]:
    """Return the value of each given option as text, by the option's name in Python. A switch has the value "".

    `--agent dqn --head.num-atoms=21 --quiet` becomes `{"agent": "dqn", "head.num_atoms": "21", "quiet": ""}`. Names
    are not checked. If a value has several words, only the first word is returned. If an option is repeated, its last
    value is returned.
    """
    texts: dict[str, str] = {}
    for argument, following in zip(arguments, [*arguments[1:], "--"]):
        option, joined, text = argument.partition("=")
        if option.startswith("--"):
            value = text if joined else following
            texts[option.removeprefix("--").replace("-", "_")] = "" if value.startswith("--") else value
    return texts


def make_options(name: str, fields: Mapping[str, tuple[Any, Any]]) -> Any:
    """Create a dataclass of options at run time. Return an instance with the defaults.

    Args:
        name: name of the dataclass.
        fields: name -> (annotation for tyro, default).
    """
    made = dataclasses.make_dataclass(name, [(field, hint) for field, (hint, _) in fields.items()], frozen=True)
    return made(**{field: default for field, (_, default) in fields.items()})


def _unknown(unknown: list[str], known: list[str], prog: str, describe_owner: Callable[[str], str]) -> str:
    options = [argument.partition("=")[0] for argument in unknown if argument.startswith("--")]
    if not options:
        hint = " A switch has no value: --no-NAME turns it off." if unknown[0].lower() in ("true", "false") else ""
        return f"Unexpected argument {unknown[0]!r}.{hint} See `{prog} --help`."
    name = options[0]
    if owner := describe_owner(name):
        return f"There is no option {name}.{owner}"
    chooser, dot, _ = name.partition(".")
    if dot and chooser in known and not any(option.startswith(f"{chooser}.") for option in known):
        return f"{name} depends on the value of {chooser}: give {chooser} too. See `{prog} --help`."
    nearest = suggest(name.replace("_", "-"), known)
    return f"There is no option {name}.{nearest or f' See `{prog} --help`.'}"


def _sentence(box: str) -> str:
    # tyro prints a box with a title, the message, a horizontal line, and help text that `--help` shows too.
    message: list[str] = []
    for line in box.splitlines()[1:]:
        rule = "───" in line or "---" in line  # a horizontal line, in Unicode or ASCII
        if message and rule:
            break
        if not rule:
            message.append(line.strip("│ "))
    text = re.sub(r"\s+", " ", " ".join(message)).strip().rstrip(".") + "."
    return re.sub(r"^Error parsing \w+: ", "", text)  # tyro's prefix of errors from a config


def _registry() -> Any:
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def _(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        if getattr(info.type, "__origin__", info.type) is not dict:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="JSON",
            instance_from_str=lambda strings: _json_object(strings[0]),
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [json.dumps(value)],
        )

    @registry.primitive_rule
    def _(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        if not takes_function(info.type):
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="FLOAT|SCHEDULE",
            instance_from_str=lambda strings: _number_or_text(strings[0]),
            is_instance=lambda value: value is None or isinstance(value, (int, float, str)),
            str_from_instance=lambda value: [str(value)],
        )

    return registry


def _number_or_text(text: str) -> float | str | None:
    """Return the value of an option that is a number, a schedule or None."""
    if text == "None":
        return None
    with contextlib.suppress(ValueError):
        return float(text)
    return text


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f'{text!r} is not a JSON object such as {{"frame_skip": 4}}')
    return value
