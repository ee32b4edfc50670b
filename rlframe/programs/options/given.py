"""Options that take a class or a function in place of its name."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from rlframe.errors import UsageError
from rlframe.programs.options import naming
from rlframe.programs.options.object_names import ObjectName, is_live, object_name, recall

OPTIONS = ("agent", "env", "network", "topology", "engine", "operator", "replay")

_WANTED = {
    "agent": "a subclass of rlframe.Agent",
    "env": "a class of environments, or a function that makes one",
    "network": "a function make_net(observation_spec, action_spec)",
}


def name_of(option: str, given: Any) -> Any:
    """Name what a user gave for one of `OPTIONS`: by a name of ours, `file.py:NAME`, `module:NAME` or a live one.

    Args:
        option: which.
        given: for an agent, environment or network a class or function; a name, in which the path of a file is made
            absolute; None stays None.

    Raises:
        UsageError: it is none of these.
    """
    if given is None or is_live(given) or isinstance(given, ObjectName):
        return given
    if isinstance(given, (str, os.PathLike)):
        return naming.absolute_name(os.fspath(given))
    if option not in _WANTED:
        return given  # refused with its type, as any other option
    if not callable(given) or (option == "env" and _is_one_environment(given)):
        raise _not_nameable(option, given)
    name = object_name(given)
    tables = {"agent": naming.AGENTS, "network": naming.NETWORKS}
    ours = {where: each for each, where in tables.get(option, {}).items()}
    return ours.get(name, name)


def named(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with names where `name_of` gives any."""
    return {option: name_of(option, value) if option in OPTIONS else value for option, value in values.items()}


def with_given(saved: dict[str, Any], config: pathlib.Path, given: Mapping[str, Any], replace: bool) -> dict[str, Any]:
    """Return the fields of a saved config with names that hold objects: those given, or those of a run in this process.

    Args:
        saved: by field.
        config: the path of the config.
        given: by option, as for `name_of`; in place of live names.
        replace: whether in place of others as well.
    """
    values = dict(saved)
    for field, name in saved.items():
        option = "topology" if field == "name" else field
        wanted = name_of(option, given.get(option)) if option in OPTIONS else None
        if wanted is not None and (replace or is_live(name) or wanted == name):
            values[field] = wanted
        elif option in OPTIONS and is_live(name):
            values[field] = recall(config, option, name)
    return values


def check_can_leave(names: Mapping[str, Any], topology: str) -> None:
    """Raise UsageError if an object is live: a topology of several processes cannot send it by its name."""
    for option, name in names.items():
        if not is_live(name):
            continue
        label = name.partition(":")[2].rpartition(".")[2]
        raise UsageError(
            f"{option}={label} is defined in a notebook, in an interactive session or inside a function, and the "
            f"processes of the topology {topology} cannot import it from there. Move it to a file, as in "
            f"my_{option}.py, and give {option}='my_{option}.py:{label}'; or use the topology single_process."
        )


def _is_one_environment(given: Any) -> bool:
    return not isinstance(given, type) and hasattr(given, "reset") and hasattr(given, "step")


def _not_nameable(option: str, given: Any) -> UsageError:
    kind = type(given).__name__
    wanted = f"{option} takes {_WANTED[option]}, or its name, as file.py:NAME"
    if option == "env" and _is_one_environment(given):
        spec = getattr(given, "spec", None)
        instead = kind if spec is None else repr(spec.id)
        return UsageError(
            f"{wanted}; got one environment, of {kind}. A run makes several of them: give env={instead}, or a function "
            "that makes one, as in env=lambda: ..."
        )
    if option == "agent" and hasattr(given, "config_cls"):
        return UsageError(f"{wanted}; got one agent. Give agent={kind}, and the fields of its config as options.")
    if option == "network" and hasattr(given, "init") and hasattr(given, "apply"):
        return UsageError(
            f"{wanted}; got a network, of {kind}. Give a function that returns it: network=lambda observation_spec, "
            "action_spec: ..."
        )
    if option == "network" and hasattr(given, "build"):
        return UsageError(f"{wanted}; got the config of one. Give its name, as in network='mlp', network_config=...")
    return UsageError(f"{wanted}; got {given!r}.")
