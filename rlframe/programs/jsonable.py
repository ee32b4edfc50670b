"""Dataclasses to JSON and back, and values to what an annotation says: by type hints."""

from __future__ import annotations

import collections.abc
import dataclasses
import os
import types
import typing
from typing import Any, Union

from rlframe.errors import UsageError, suggest

_LONGEST = 80  # characters of a received value in a message


def to_jsonable(value: Any) -> Any:
    """`value` as what `json.dumps` takes: dataclasses become dicts, tuples and arrays lists.

    Raises:
        UsageError: it holds something that JSON cannot.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, collections.abc.Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if _is_array(value):
        return to_jsonable(value.tolist())
    raise UsageError(f"{value!r} ({type(value).__name__}) does not go into config.json: use numbers, strings, lists.")


def from_jsonable(cls: type, values: Any, where: str) -> Any:
    """The inverse of `to_jsonable` for a dataclass.

    Args:
        cls: the dataclass to build.
        values: what JSON held.
        where: named in errors, e.g. `config.json: agent_config`.

    Raises:
        UsageError: a field is unknown, or a value does not fit its annotation.
    """
    if not isinstance(values, dict):
        raise UsageError(f"{where}: expected an object with the fields of {cls.__name__}, got {_received(values)}.")
    hints = hints_of(cls)
    for name in values:
        if name not in hints:
            raise UsageError(f"{where}: {cls.__name__} has no field {name!r}.{suggest(name, hints)}")
    return cls(**{name: convert(hints[name], value, f"{where}.{name}") for name, value in values.items()})


def hints_of(cls: type) -> dict[str, Any]:
    """The annotation of each field that the constructor of a dataclass takes."""
    try:
        every = typing.get_type_hints(cls)
    except (NameError, TypeError):  # it names something local to a function, or of a newer Python
        every = {}
    return {field.name: every.get(field.name, Any) for field in dataclasses.fields(cls) if field.init}


def convert(hint: Any, value: Any, where: str) -> Any:
    """Return a value as the annotation `hint` has it: lists become tuples, NumPy's numbers Python's, paths strings.

    Raises:
        UsageError: it does not fit; the sentence begins with `where`.
    """
    if hint is Any:
        return value
    if _is_array(value):
        value = value.tolist()
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(hint, value, where)
    if origin is typing.Literal:
        if not any(value == each and isinstance(value, type(each)) for each in arguments):
            raise UsageError(f"{where}: expected {name_of(hint)}, got {_received(value)}.")
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
    if isinstance(wants, type) and (not isinstance(value, wants) or (wants is int and isinstance(value, bool))):
        raise UsageError(f"{where}: expected {name_of(hint)}, got {_received(value)}.")
    return value


def _convert_union(hint: Any, value: Any, where: str) -> Any:
    for option in typing.get_args(hint):
        try:
            return convert(option, value, where)
        except UsageError:
            continue
    raise UsageError(f"{where}: expected {name_of(hint)}, got {_received(value)}.")


def name_of(hint: Any) -> str:
    """An annotation in words: `int or None`, `tuple of int`, `'a' or 'b'`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (None, type(None)):
        return "None"
    if origin in (Union, types.UnionType):
        return " or ".join(map(name_of, arguments))
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple:
        of = arguments[:1] if arguments[-1] is ... else arguments
        return f"tuple of {', '.join(map(name_of, of))}"
    return getattr(hint, "__name__", str(hint))


def _received(value: Any) -> str:
    """A value and its type, in one line."""
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return f"the {'class' if isinstance(value, type) else type(value).__name__} {value.__qualname__}"
    shown = " ".join(repr(value).split())
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
    return shown if value is None or isinstance(value, (bool, float)) else f"{shown} ({type(value).__name__})"


def _is_array(value: Any) -> bool:
    """Whether it is an array, or a scalar, of NumPy or JAX."""
    return hasattr(value, "dtype") and hasattr(value, "tolist") and not isinstance(value, type)
