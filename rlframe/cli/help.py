"""The text of `--help`: options in groups, one line each, with their defaults.

The text of an option is the comment beside its field, or above it:

    steps: int = 100_000  # Environment steps of the run.      --steps INT    Environment steps of the run. [100000]
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import inspect
import io
import json
import textwrap
import tokenize
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import tyro

from rlframe.programs.options.fields import takes_function

_NAMES = {int: "INT", float: "FLOAT", str: "TEXT", dict: "JSON", bool: "True|False"}
_LONGEST_CHOICES = 24  # maximum length of a list of choices beside a flag; the text contains longer lists
_COLUMN = 30  # column in which the texts begin


@dataclasses.dataclass(frozen=True)
class OptionField:
    """One option of a command: a field of a dataclass. That dataclass may be nested in another dataclass.

    Attributes:
        name: name in Python. The option of a nested dataclass has a dot: `head.num_atoms`.
        flag: name on the command line: `--head.num-atoms`.
        hint: annotation of the field, without tyro's marks.
        marks: tyro's marks in the annotation.
        default: value of the field; `dataclasses.MISSING` if there is none.
        text: comment beside the field.
        group: title of its group in the help. "" means the group of all other options.
    """

    name: str
    flag: str
    hint: Any
    marks: tuple[Any, ...]
    default: Any
    text: str
    group: str = ""

    @property
    def is_positional(self) -> bool:
        """True if the argument is given by its position, without a flag."""
        return tyro.conf.Positional in self.marks

    @property
    def flags(self) -> list[str]:
        """All flags of the option. A switch has a second flag, which turns the switch off."""
        if self.is_positional:
            return []
        start, last = self._split_flag()
        return [self.flag, f"{start}no-{last}"] if self._can_turn_off else [self.flag]

    @property
    def _can_turn_off(self) -> bool:
        return self.hint is bool and tyro.conf.FlagCreatePairsOff not in self.marks

    def _split_flag(self) -> tuple[str, str]:
        """Split `--head.num-atoms` into `--head.` and `num-atoms`."""
        last = self.flag.removeprefix("--").rpartition(".")[2]
        return self.flag.removesuffix(last), last

    def invocation(self) -> str:
        """The option with a placeholder for its value: `--steps INT`, `--[no-]resume`."""
        if self.hint is bool:
            return "[no-]".join(self._split_flag()) if self._can_turn_off else self.flag
        value = next((mark.metavar for mark in self.marks if getattr(mark, "metavar", None)), None)
        if self.is_positional:
            name = self.name.upper()
            return value or (name if self.default is dataclasses.MISSING else f"[{name}]")
        return f"{self.flag} {value or self.value_name()}"

    def value_name(self) -> str:
        """The placeholder for the option's value: `INT`, or the choices if their list is short."""
        if takes_function(self.hint):
            return "FLOAT|SCHEDULE"
        choices = "|".join(self.choices())
        members = [self.hint, *typing.get_args(self.hint)]
        name = next((found for each in members if (found := _NAMES.get(typing.get_origin(each) or each))), None)
        if choices:
            return "NAME" if len(choices) > _LONGEST_CHOICES else choices if name is None else f"{choices}|{name}"
        is_list = typing.get_origin(self.hint) in (tuple, list)
        return f"{name or 'VALUE'}{'...' * is_list}"

    def choices(self) -> list[str]:
        """The values that a `Literal` in the annotation allows."""
        hints = [self.hint, *typing.get_args(self.hint)]
        literal = next((each for each in hints if typing.get_origin(each) is Literal), None)
        return [str(value) for value in typing.get_args(literal)] if literal is not None else []

    def description(self) -> str:
        """The option's text in the help: its comment as a sentence, a long list of choices, and its default."""
        text, choices = _as_sentence(self.text), self.choices()
        if choices and "|".join(choices) not in self.invocation():
            text = f"{text.rstrip('.')}. One of {', '.join(choices)}.".removeprefix(". ")
        default = _shown(self.default)
        return f"{text} [{default}]".strip() if default else text


def _as_sentence(text: str) -> str:
    """Capitalize the first word and add a period. Do not capitalize a value or a symbol, such as `float32` or `l_0`."""
    word, _, rest = text.partition(" ")
    if rest and word.isalpha():
        text = f"{word[0].upper()}{word[1:]} {rest}"
    return text if text.endswith(".") or not rest else f"{text}."


def _shown(default: Any) -> str:
    """Return a default as text in the format of the command line, or "" for a default that the help does not show."""
    if default is dataclasses.MISSING or default is None or default is False or default in ("", (), {}):
        return ""
    if default is True:
        return "on"
    if isinstance(default, (tuple, list)):
        return " ".join(map(str, default))
    return json.dumps(default) if isinstance(default, dict) else str(default)


def option_fields(options: Any, prefix: str = "") -> Iterator[OptionField]:
    """Return all options of a dataclass. `options` is the class, or an instance that contains the defaults."""
    cls = options if isinstance(options, type) else type(options)
    texts = field_comments(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name, annotated in _annotations(cls).items():
        if name not in fields or not fields[name].init:
            continue
        marks, hint = _split(annotated)
        is_optional_part = any(dataclasses.is_dataclass(each) for each in typing.get_args(hint))
        if tyro.conf.Suppress in marks or (is_optional_part and getattr(options, name, None) is None):
            continue
        own = name
        for mark in marks:
            given = getattr(mark, "name", None)
            own = own if given is None else given  # "" means no prefix
            own = "" if mark is tyro.conf.OmitArgPrefixes else own
        factory = fields[name].default_factory
        default = fields[name].default if factory is dataclasses.MISSING else factory()
        default = default if options is cls else getattr(options, name)
        part = default if dataclasses.is_dataclass(default) else hint
        if dataclasses.is_dataclass(part):
            yield from option_fields(part, f"{prefix}{own}." if own else prefix)
            continue
        text = next((mark.help for mark in marks if getattr(mark, "help", None)), None) or texts.get(name, "")
        path = prefix + own
        flag, group = f"--{path}".replace("_", "-"), _group_of(cls, fields[name])
        yield OptionField(path.replace("-", "_"), flag, hint, marks, default, text, group)


def _group_of(cls: type, field: dataclasses.Field) -> str:
    """Return the help group of a field: `option(group=...)`, or `help_group` of the class that defines the field."""
    owners = (each for each in reversed(cls.__mro__) if field.name in getattr(each, "__dataclass_fields__", {}))
    groups = (getattr(owner, "help_group", "") for owner in owners)
    return field.metadata.get("group") or next(filter(None, groups), "")


def _annotations(cls: type) -> dict[str, Any]:
    """Return the annotations by field name. If they cannot be evaluated, return them as strings."""
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except (NameError, TypeError):  # raised if an annotation uses a local name or needs a newer Python
        return {field.name: field.type for field in dataclasses.fields(cls)}


def _split(annotated: Any) -> tuple[tuple[Any, ...], Any]:
    """Return tyro's marks of an annotation, and the annotation without the marks."""
    marks: tuple[Any, ...] = ()
    while hasattr(annotated, "__metadata__"):
        marks, annotated = (*marks, *annotated.__metadata__), annotated.__origin__
    return marks, annotated


@functools.cache
def field_comments(cls: type) -> dict[str, str]:
    """Return the comments of a dataclass's fields by field name, including fields of base classes."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        found |= _own_comments(each)
    return found


@functools.cache
def _own_comments(cls: type) -> dict[str, str]:
    try:
        return _comments(textwrap.dedent(inspect.getsource(cls))) if dataclasses.is_dataclass(cls) else {}
    # Python finds no source, or a wrong source, for a class that was created at run time or in a notebook.
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return {}


def _comments(source: str) -> dict[str, str]:
    tree = ast.parse(source)
    comments: dict[int, tuple[str, bool]] = {}  # line number -> (text, whether code precedes the comment)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# ---", "# type:", "# noqa")):
            text = token.string.lstrip("# ").partition("  # ")[0]
            comments[token.start[0]] = text, bool(token.line[: token.start[1]].strip())
    found = {}
    body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
    for node in body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        above: list[str] = []
        line = node.lineno - 1
        while line in comments and not comments[line][1]:
            above.insert(0, comments[line][0])
            line -= 1
        beside = [comments[line][0] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in comments]
        if above or beside:
            found[node.target.id] = " ".join([*above, *beside])
    return found


def format_help(
    fields: Sequence[OptionField],
    prog: str,
    description: str,
    width: int,
    rest: str = "Options",
    last: str = "",
) -> str:
    """Return the text of `--help`. Groups with fewer options come first.

    Args:
        fields: the options to show.
        prog: name of the command.
        description: first lines of the help.
        width: columns of the terminal.
        rest: title of the options without a group.
        last: last line of the help.
    """
    positional = [field for field in fields if field.is_positional]
    usage = " ".join([f"usage: {prog}", "[OPTIONS]", *(field.invocation() for field in positional)])
    lines = [usage, "", *textwrap.wrap(description, width)]
    options = [field for field in fields if not field.is_positional]
    # list `--traceback` last, because every command has it and few users need it
    options.sort(key=lambda field: field.name == "traceback")
    by_group: dict[str, list[OptionField]] = collections.defaultdict(list)
    for field in options:
        by_group[field.group or rest].append(field)
    arguments = [("Arguments", positional)] if positional else []
    for title, members in [*arguments, *sorted(by_group.items(), key=lambda item: len(item[1]))]:
        lines += ["", f"{title}:"]
        for field in members:
            lines += _rows(field, width)
    return "\n".join([*lines, *(["", *textwrap.wrap(last, width)] if last else [])])


def _rows(field: OptionField, width: int) -> list[str]:
    start = f"  {field.invocation()}"
    start = f"{start}  " if len(start) + 2 > _COLUMN else start.ljust(_COLUMN)
    room = max(width, 60)
    return textwrap.wrap(
        start + field.description(),
        room,
        subsequent_indent=" " * _COLUMN,
        break_on_hyphens=False,
        break_long_words=False,
        drop_whitespace=True,
    ) or [start]
