"""Work with options that are fields of dataclasses: find their names, check their values, convert from and to JSON."""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import os
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Union

from rlframe.errors import UsageError, check_above, check_at_least, suggest
from rlframe.programs.options.object_names import ObjectName, absolute_name, object_name

# `async` is a keyword of Python, so `async=True` is a syntax error.
_KEYWORDS = {"async": "async_envs", "async_": "async_envs"}
_LONGEST = 80  # an error message shows at most this number of characters of a value


def option(
    default: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    changeable: bool = False,
    group: str = "",
    multi_run: Literal["each", "command", "refused"] = "refused",
) -> Any:
    """Return a dataclass field with more facts about an option: `frame_stack: int = option(1, at_least=1)`.

    The comment beside the field, or above it, is the option's text in `--help`. If the comment begins with "Internal:",
    the help does not show the option. A field without `option(...)` is an option too.

    Args:
        default: default of the field. None is never checked.
        at_least: inclusive lower limit for `check_numbers`.
        above: exclusive lower limit for `check_numbers`.
        changeable: True if a resumed run can change the option.
        group: title of the option's group in `rlframe train --help`. "" means `help_group` of the dataclass, or "Agent"
            if it has none.
        multi_run: what a command that starts several runs, such as `rlframe train --seeds`, does with an option of a
            session. "each" passes it to each run, "command" means that only the command uses it, "refused" is an error.
    """
    facts = {"at_least": at_least, "above": above, "changeable": changeable, "group": group, "multi_run": multi_run}
    return dataclasses.field(default=default, metadata=facts)


def parse_ranges(text: str) -> list[range]:
    """Parse `1-5`, `1,2,7` or `1-3,10`. Raise ValueError if the format is wrong."""
    ranges = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ranges.append(range(int(first), int(last if dash else first) + 1))
    return ranges


def parse_ids(name: str, text: str) -> tuple[int, ...]:
    """Parse the ids of devices: `0`, `1-3` or `0,2`.

    Raises:
        UsageError: the format is wrong, or an id occurs twice. The message contains `name`, the name of the option.
    """
    try:
        ranges = parse_ranges(text)
    except ValueError:
        ranges = []
    ids = [number for each in ranges for number in each]
    if not ids or not all(ranges) or len({*ids}) < len(ids):
        raise UsageError(f"{name} must be the ids of devices, such as 0, 1-3 or 0,2, got {text!r}.")
    return tuple(ids)


def check_numbers(config: Any) -> None:
    """Raise UsageError if a number in a config is below the limit of its field."""
    for field in dataclasses.fields(config):
        if (least := field.metadata.get("at_least")) is not None:
            check_at_least(config, least, field.name)
        if (bound := field.metadata.get("above")) is not None:
            check_above(config, bound, field.name)


def field_names(cls: Any) -> list[str]:
    """Return the names of a dataclass's fields."""
    return [field.name for field in dataclasses.fields(cls)]


def takes_function(hint: Any) -> bool:
    """Return True if an annotation allows a function, as that of a schedule: `float | str | Callable`."""
    return any(typing.get_origin(each) is collections.abc.Callable for each in typing.get_args(hint))


def flat_fields(config: Any) -> dict[str, Any]:
    """Return a dict: name -> value of each `init` field of a dataclass."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}


def option_values(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return a dict: name -> value of each option. Names in a nested config have a dot, such as `head.num_atoms`."""
    values = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        values[prefix + field.name] = value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            values |= option_values(value, f"{prefix}{field.name}.")
    return values


def resolve_names(
    options: Mapping[str, Any], known: Iterable[str], owner: str, describe_owner: Any = None, others: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the options with their full names, such as `network.hidden` for `network_hidden`.

    Args:
        options: the given options.
        known: names of all existing options.
        owner: description of the object that has the `known` options, for error messages.
        describe_owner: function that returns a sentence for error messages, or "". The sentence explains which agents
            or choices have an unknown option.
        others: more names that an error message can suggest for an unknown option.

    Raises:
        UsageError: an option is unknown, or given twice under different names.
    """
    names = dict.fromkeys(known)
    by_word = {name.replace(".", "_"): name for name in reversed(names)} | {name: name for name in names}
    found: dict[str, Any] = {}
    for given, value in options.items():
        name = by_word.get(_KEYWORDS.get(given, given).replace("-", "_"))
        if name is None:
            raise UsageError(
                f"There is no option {given!r} of {owner}.{_hint(given, [*by_word, *others], describe_owner)}"
            )
        if name in found:
            raise UsageError(f"The option {name} is given twice, once as {given}: give it once.")
        found[name] = value
    return found


def _hint(given: str, known: Sequence[str], describe_owner: Any) -> str:
    switch = _KEYWORDS.get(given[3:], given[3:])
    if given.startswith("no_") and switch in known:
        return f" To turn off a switch, use {switch}=False."
    has_network = any(name.startswith("network.") for name in known)
    if given.startswith(("network.", "network_")) and "network" in known and not has_network:
        return " Only some networks have this option: choose one of them, such as network='mlp'."
    return (describe_owner(given) if describe_owner else "") or suggest(given, known)


def choices_of(hint: Any) -> dict[str, Any]:
    """Return a dict: name -> dataclass, for a union from which users choose by name, such as head="categorical".

    Each member must be a dataclass with a class attribute `name` that is not a field. Otherwise, return {}.
    """
    members = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else ()
    choices = {name: each for each in members if (name := _choice_name(each)) is not None}
    return choices if len(choices) == len(members) else {}


def _choice_name(cls: Any) -> str | None:
    """Return the class attribute `name` of a dataclass. Return None if `name` does not exist or is a field."""
    if not dataclasses.is_dataclass(cls) or "name" in {field.name for field in dataclasses.fields(cls)}:
        return None
    name = getattr(cls, "name", None)
    return name if isinstance(name, str) else None


def with_choices(config: Any, names: Mapping[str, Any]) -> Any:
    """Return a config with the choices in `names`, such as head="categorical". Keep a choice that has this name."""
    changes = {}
    for field, hint in hints_of(type(config)).items():
        given = names.get(field)
        if given is not None and choices_of(hint) and given != getattr(config, field).name:
            changes[field] = convert(hint, given, field)
    return dataclasses.replace(config, **changes) if changes else config


def with_options(config: Any, options: Mapping[str, Any], prefix: str = "") -> Any:
    """Return a config with new values for some fields, including fields of nested configs.

    Args:
        config: a dataclass.
        options: new values by name, with the names of `option_values`.
        prefix: prefix of the names in error messages.

    Raises:
        UsageError: a value does not match the annotation of its field.
    """
    config = with_choices(config, options)
    hints = hints_of(type(config))
    values: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    for name, value in options.items():
        first, dot, rest = name.partition(".")
        if dot:
            parts[first][rest] = value
        else:
            is_chosen = value is not None and choices_of(hints.get(first))
            value = getattr(config, first) if is_chosen else value
            values[first] = convert(hints.get(first, Any), value, prefix + name)
    for first, inner in parts.items():
        values[first] = with_options(values.get(first, getattr(config, first)), inner, f"{prefix}{first}.")
    return dataclasses.replace(config, **values)


# --- JSON, and annotations


def to_jsonable(value: Any) -> Any:
    """Convert `value` to JSON-compatible values: dataclasses become dicts, tuples and arrays become lists.

    Raises:
        UsageError: JSON cannot represent the value.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
        name = _choice_name(type(value))
        return fields if name is None else {"name": name, **fields}
    if isinstance(value, collections.abc.Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if _is_array(value):
        return to_jsonable(value.tolist())
    raise UsageError(f"config.json cannot contain {value!r} ({type(value).__name__}): use numbers, strings and lists.")


def from_jsonable(cls: type, values: Any, where: str) -> Any:
    """Build a dataclass from JSON values: the inverse of `to_jsonable`.

    Args:
        cls: the dataclass to build.
        values: the JSON values.
        where: location for error messages, such as `config.json: agent_config`.

    Raises:
        UsageError: a field is unknown, or a value does not match its annotation.
    """
    if not isinstance(values, dict):
        raise UsageError(f"{where}: expected an object with the fields of {cls.__name__}, got {_received(values)}.")
    hints = hints_of(cls)
    if "name" in values and values["name"] == _choice_name(cls):
        values = {name: value for name, value in values.items() if name != "name"}
    for name in values:
        if name not in hints:
            raise UsageError(f"{where}: {cls.__name__} has no field {name!r}.{suggest(name, hints)}")
    return cls(**{name: convert(hints[name], value, f"{where}.{name}") for name, value in values.items()})


def hints_of(cls: type) -> dict[str, Any]:
    """Return the annotation of each `init` field of a dataclass. Unreadable annotations become `Any`."""
    try:
        every = typing.get_type_hints(cls)
    except (NameError, TypeError):  # an annotation uses a local name, or the syntax of a newer Python
        every = {}
    return {field.name: every.get(field.name, Any) for field in dataclasses.fields(cls) if field.init}


def convert(hint: Any, value: Any, where: str) -> Any:
    """Convert a value to the type of an annotation: lists to tuples, NumPy scalars to Python numbers, paths to strings.

    Raises:
        UsageError: the value does not match the annotation. The message begins with `where`.
    """
    if hint is Any:
        return value
    if _is_array(value):
        value = value.tolist()
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if choices := choices_of(hint):
        return _convert_choice(choices, value, where)
    if origin in (Union, types.UnionType):
        return _convert_union(hint, value, where)
    if origin is typing.Literal:
        if not any(value == each and isinstance(value, type(each)) for each in arguments):
            raise UsageError(f"{where}: expected {describe_hint(hint)}, got {_received(value)}.")
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        of = [arguments[0]] * len(value) if len(arguments) == 2 and arguments[1] is ... else list(arguments)
        if len(of) != len(value):
            raise UsageError(f"{where}: expected {len(of)} values, got {len(value)}: {_received(value)}.")
        return tuple(convert(each, item, where) for each, item in zip(of, value, strict=True))
    if origin in (dict, collections.abc.Mapping) and isinstance(value, dict):
        key_hint, hint = arguments
        return {convert(key_hint, key, f"a name in {where}"): convert(hint, each, where) for key, each in value.items()}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_jsonable(hint, value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    wants = type(None) if hint is None else origin or hint
    is_wrong = wants is int and isinstance(value, bool)
    is_wrong |= wants is collections.abc.Callable  # `_convert_union` has converted each function to its name
    if isinstance(wants, type) and (is_wrong or not isinstance(value, wants)):
        raise UsageError(f"{where}: expected {describe_hint(hint)}, got {_received(value)}.")
    return value


def _convert_choice(choices: Mapping[str, Any], value: Any, where: str) -> Any:
    """Return the instance of a choice. `value` is an instance, a name, or a dict with the name and options."""
    if isinstance(value, tuple(choices.values())):
        return value
    options = dict(value) if isinstance(value, dict) else {"name": value}
    name = options.pop("name", None)
    if name not in choices:
        raise UsageError(f"{where}: expected {' or '.join(map(repr, choices))}, got {_received(name)}.")
    return from_jsonable(choices[name], options, where)


def _convert_union(hint: Any, value: Any, where: str) -> Any:
    if takes_function(hint):
        if callable(value) and not isinstance(value, type):
            return object_name(value)
        if isinstance(value, str) and not isinstance(value, ObjectName):
            return absolute_name(value)
    for option in typing.get_args(hint):
        try:
            return convert(option, value, where)
        except UsageError:
            continue
    raise UsageError(f"{where}: expected {describe_hint(hint)}, got {_received(value)}.")


def describe_hint(hint: Any) -> str:
    """Describe an annotation in words: `int or None`, `tuple of int`, `'a' or 'b'`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (None, type(None)):
        return "None"
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe_hint, arguments))
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if origin is collections.abc.Callable:
        return "function"
    if origin is tuple:
        of = arguments[:1] if arguments[-1] is ... else arguments
        return f"tuple of {', '.join(map(describe_hint, of))}"
    return getattr(hint, "__name__", str(hint))


def _received(value: Any) -> str:
    """Describe a value and its type in one line."""
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return f"the {'class' if isinstance(value, type) else type(value).__name__} {value.__qualname__}"
    shown = " ".join(repr(value).split())
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
    return shown if value is None or isinstance(value, (bool, float)) else f"{shown} ({type(value).__name__})"


def _is_array(value: Any) -> bool:
    """Return True for an array or scalar of NumPy or JAX."""
    return hasattr(value, "dtype") and hasattr(value, "tolist") and not isinstance(value, type)
