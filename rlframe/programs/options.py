"""Options by their names in Python: those of `rlframe train`, with underscores."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlframe.errors import UsageError, suggest
from rlframe.programs.jsonable import convert, hints_of

# A keyword of Python cannot be written as `async=True`.
_KEYWORDS = {"async": "async_envs", "async_": "async_envs"}


def option_names(config: Any, prefix: str = "") -> list[str]:
    """The options that a config has, those of the configs in it with a dot: `model.hidden_size`."""
    names = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        names.append(prefix + field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names += option_names(value, f"{prefix}{field.name}.")
    return names


def resolved(
    options: Mapping[str, Any], known: Iterable[str], of: str, elsewhere: Any = None, others: Iterable[str] = ()
) -> dict[str, Any]:
    """The options by their own names: `network_hidden` is `network.hidden`, `async_` is `async_envs`.

    Args:
        options: as they were given.
        known: the names of all that there are.
        of: what has these options, for messages.
        others: names that are suggested as well.
        elsewhere: gives a sentence on who has an option that is unknown here; "" if nobody has it.

    Raises:
        UsageError: an option is unknown, or given twice by two of its names.
    """
    names = dict.fromkeys(known)
    by_word = {name.replace(".", "_"): name for name in reversed(names)} | {name: name for name in names}
    found: dict[str, Any] = {}
    for given, value in options.items():
        name = by_word.get(_KEYWORDS.get(given, given).replace("-", "_"))
        if name is None:
            raise UsageError(f"There is no option {given!r} of {of}.{_hint(given, [*by_word, *others], elsewhere)}")
        if name in found:
            raise UsageError(f"The option {name} is given twice, once as {given}: give it once.")
        found[name] = value
    return found


def _hint(given: str, known: Sequence[str], elsewhere: Any) -> str:
    switch = _KEYWORDS.get(given[3:], given[3:])
    if given.startswith("no_") and switch in known:
        return f" Turn a switch off by {switch}=False."
    has_network = any(name.startswith("network.") for name in known)
    if given.startswith(("network.", "network_")) and "network" in known and not has_network:
        return " It is an option of some networks: name one that has it by network, as network='mlp'."
    return (elsewhere(given) if elsewhere else "") or suggest(given, known)


def with_options(config: Any, options: Mapping[str, Any], prefix: str = "") -> Any:
    """The config with other values of some of its fields, and of those of the configs in it.

    Args:
        config: a dataclass.
        options: by name, as `option_names` has them.
        prefix: of the names in messages.

    Raises:
        UsageError: a value does not fit the annotation of its field.
    """
    hints = hints_of(type(config))
    values: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    for name, value in options.items():
        first, dot, rest = name.partition(".")
        if dot:
            parts[first][rest] = value
        else:
            values[first] = convert(hints.get(first, Any), value, prefix + name)
    for first, inner in parts.items():
        values[first] = with_options(values.get(first, getattr(config, first)), inner, f"{prefix}{first}.")
    return dataclasses.replace(config, **values)
