"""Dataclasses to JSON and back, by their type hints."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from typing import Any, Union

from rlframe.errors import UsageError, suggest


def to_jsonable(value: Any) -> Any:
    """`value` as what `json.dumps` takes: dataclasses become dicts, tuples lists.

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
    if hasattr(value, "item"):  # a numpy scalar
        return value.item()
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
        raise UsageError(f"{where}: expected an object with the fields of {cls.__name__}, got {values!r}.")
    every = typing.get_type_hints(cls)
    hints = {field.name: every[field.name] for field in dataclasses.fields(cls) if field.init}
    for name in values:
        if name not in hints:
            raise UsageError(f"{where}: {cls.__name__} has no field {name!r}.{suggest(name, hints)}")
    return cls(**{name: _convert(hints[name], value, f"{where}.{name}") for name, value in values.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    """What JSON held, as the annotation `hint` has it. Raises `UsageError`, naming `where`, where it does not fit."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(arguments, value, where)
    if origin is typing.Literal:
        if value not in arguments:
            raise UsageError(f"{where}: expected one of {arguments}, got {value!r}.")
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        of = [arguments[0]] * len(value) if len(arguments) == 2 and arguments[1] is ... else list(arguments)
        if len(of) != len(value):
            raise UsageError(f"{where}: expected {len(of)} values, got {len(value)}: {value!r}.")
        return tuple(_convert(each, item, where) for each, item in zip(of, value, strict=True))
    if origin in (dict, collections.abc.Mapping) and isinstance(value, dict):
        return dict(value)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_jsonable(hint, value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wants = origin or hint
    if hint is type(None):
        wants = type(None)
    if isinstance(wants, type) and (not isinstance(value, wants) or (wants is int and isinstance(value, bool))):
        raise UsageError(f"{where}: expected {getattr(hint, '__name__', hint)}, got {value!r}.")
    return value


def _convert_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    for option in options:
        try:
            return _convert(option, value, where)
        except UsageError:
            continue
    names = " or ".join(
        "None" if option is type(None) else getattr(option, "__name__", str(option)) for option in options
    )
    raise UsageError(f"{where}: expected {names}, got {value!r}.")
