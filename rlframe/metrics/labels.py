"""Labels of curves: what sets a run apart from the others in a picture, in full."""

from __future__ import annotations

import collections
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Config = Mapping[str, Any]  # of an experiment, flat: "agent_config.learning_rate" -> 0.001

_PLAIN = re.compile(r"[\w.+/:-]+")  # a string that needs no quotes
_MOST_FOLDERS = 3  # of a path, before all of it is shown


def labels(configs: Sequence[Config]) -> list[str]:
    """Say of each config in which options it differs from the others: `learning_rate 0.001, topology heavy_env`.

    Every option in which two of them differ is in the labels of those that have it. An option that only some of the
    topologies, networks or agents have is left out where these differ, as their names say it.

    Args:
        configs: n, no two of which are equal.

    Returns:
        n texts, no two of which are equal. One may be empty.
    """
    names = sorted({name for config in configs for name in config})
    shown = _option_names(names)
    texts: dict[str, dict[str, str]] = {}
    for name in names:
        if _differs(name, configs):
            texts[name] = _value_texts([config[name] for config in configs if name in config])
    return [
        ", ".join(f"{shown[name]} {text[repr(config[name])]}" for name, text in texts.items() if name in config)
        for config in configs
    ]


def _differs(name: str, configs: Sequence[Config]) -> bool:
    """Return True if two configs have different values of an option, or one lacks an option that it could have."""
    having = [config for config in configs if name in config]
    if len({repr(config[name]) for config in having}) > 1:
        return True
    lacking = [config for config in configs if name not in config]
    chooser = _chooser(name)
    if chooser is None:
        return bool(lacking)
    chosen = {repr(config.get(chooser)) for config in having}
    return any(repr(config.get(chooser)) in chosen for config in lacking)


def _chooser(name: str) -> str | None:
    """The option whose value decides whether there is an option of this name; None: it may always be there."""
    if "env_kwargs." in name:
        return None
    chosen_by = {"topology.network_config": "topology.network", "topology.": "topology.name", "agent_config.": "agent"}
    return next((chooser for prefix, chooser in chosen_by.items() if name.startswith(prefix)), None)


def _option_names(names: Iterable[str]) -> dict[str, str]:
    """By name, the shortest form that is the form of no other: `hidden`, `network.hidden`, or the whole of it."""
    forms = {name: _forms(name) for name in names}
    counts = collections.Counter(form for each in forms.values() for form in dict.fromkeys(each))
    return {name: next((form for form in each if counts[form] == 1), name) for name, each in forms.items()}


def _forms(name: str) -> tuple[str, ...]:
    option = name.removesuffix(".name").replace("topology.network_config.", "network.")
    option = option.removeprefix("topology.").removeprefix("agent_config.")
    return option.rpartition(".")[2], option, name


def _value_texts(values: Sequence[Any]) -> dict[str, str]:
    """By `repr` of each value, a text: the shortest of those forms in which different values look different."""
    every = {repr(value): value for value in values}
    for folders in range(_MOST_FOLDERS):
        texts = {key: _short(value, folders) for key, value in every.items()}
        if len(set(texts.values())) == len(texts):
            return texts
    return {key: key for key in every}


def _short(value: Any, folders: int) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        is_path = value.startswith("/")
        text = "/".join(pathlib.Path(value).parts[-1 - folders :]) if is_path else value
        return text if _PLAIN.fullmatch(text) else repr(text)
    return str(value)
