"""Tables of built-in names for options such as `agent`, and conversion between names and classes or functions.

`agent_class("ppo")` looks up `PPO` in the table `AGENTS`, and `agent_class("my_agent.py:Mine")` loads a file. `name_of`
is the inverse: `name_of("agent", PPO)` is "ppo", and `name_of("agent", Mine)` is "/home/me/my_agent.py:Mine".
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlframe.envs.gymnasium_registry import spec_of
from rlframe.envs.names import PREFIXES
from rlframe.errors import UsageError, suggest
from rlframe.programs.options.object_names import (
    ObjectName,
    absolute_name,
    is_file_name,
    is_live,
    load_module,
    load_object,
    object_name,
    recall_live_object,
)

if TYPE_CHECKING:
    from rlframe.agents import Agent
    from rlframe.engines import Engine

# Built-in name -> name for `load_object`. User-defined agents have no entry: their name is `file.py:Class`.
AGENTS = {
    "dqn": "rlframe.agents.dqn:DQN",
    "grpo": "rlframe.agents.grpo:GRPO",
    "impala": "rlframe.agents.impala:IMPALA",
    "ppo": "rlframe.agents.ppo:PPO",
    "pqn": "rlframe.agents.pqn:PQN",
    "r2d2": "rlframe.agents.r2d2:R2D2",
    "sac": "rlframe.agents.sac:SAC",
    "td3": "rlframe.agents.td3:TD3",
}
ENGINES = {
    "launchpad": "rlframe.engines.launchpad:LaunchpadEngine",
    "local": "rlframe.engines.local:LocalEngine",
    "ray": "rlframe.engines.ray:RayEngine",
    "threads": "rlframe.engines.threads:ThreadsEngine",
}
NETWORKS = {
    "mlp": "rlframe.agents.networks:MLPConfig",
    "nature_cnn": "rlframe.agents.networks:NatureCNNConfig",
    "lstm": "rlframe.agents.recurrent:LSTMConfig",
    "gru": "rlframe.agents.recurrent:GRUConfig",
}
# `add_replay` in `rlframe/programs/topologies/makers.py` creates these replay buffers. `add_elastic_replay` creates
# them for elastic runs.
REPLAYS = ("local", "shared_memory", "service", "reverb")
OPERATORS = {
    "local": "rlframe.coordinator.operators.supervised:LocalOperator",
    "ray": "rlframe.coordinator.operators.supervised:RayOperator",
}
# Keys are the values of `Agent.learns_from`. The first topology is the default.
TOPOLOGIES = {
    "steps": {
        "single_process": "rlframe.programs.topologies.single_process:single_process",
        "heavy_env": "rlframe.programs.topologies.heavy_env:heavy_env",
        "light_env": "rlframe.programs.topologies.light_env:light_env",
        "distributed": "rlframe.programs.topologies.light_env:distributed",
        "elastic": "rlframe.programs.topologies.elastic:elastic",
        "fused": "rlframe.programs.topologies.fused:fused",
    },
    # This topology also has the name light_env, because one policy server computes the actions of many environments.
    "trajectories": {"light_env": "rlframe.programs.topologies.language:language"},
}

# Options whose value is the name of a class or function. The first three also accept the class or function itself.
OPTIONS = ("agent", "env", "network", "topology", "engine", "operator", "replay")
_WANTED = {
    "agent": "a subclass of rlframe.Agent",
    "env": "a class of environments, a function that creates one",
    "network": "a function make_net(observation_spec, action_spec)",
}


# --- load an object by its name


def find(name: str, table: Mapping[str, str], kind: str, form: str = "file.py:Class") -> Any:
    """Return the class or function of a built-in name in `table`, or of a user-defined name.

    Raises:
        UsageError: the name does not exist.
    """
    if name not in table and not is_file_name(name) and ":" not in name:
        raise UsageError(
            f"There is no {kind} {name!r}; there are {', '.join(sorted(table))}, or your own as {form}."
            f"{suggest(name, table)}"
        )
    return load_object(table.get(name, name), kind)


def engine_class(name: str) -> type[Engine]:
    """Return the engine class of a name or `file.py:Class`. Raise UsageError if it does not exist."""
    found = find(name, ENGINES, "engine")
    if not (isinstance(found, type) and hasattr(found, "add") and hasattr(found, "run")):
        raise UsageError(f"{name} is {found!r}. An engine needs the methods of rlframe.engines.Engine, such as run().")
    return found


def operator_class(name: str) -> Any:
    """Return the operator class of a name or `file.py:Class`. Raise UsageError if it does not exist."""
    return find(name, OPERATORS, "operator")


def agent_class(name: str) -> type[Agent]:
    """Return the `Agent` subclass for a registered name or for `file.py:Class`.

    Raises:
        UsageError: the name does not exist, or is not an Agent.
    """
    found = find(name, AGENTS, "agent")
    from rlframe.agents import Agent

    if not (isinstance(found, type) and issubclass(found, Agent)):
        raise UsageError(f"{name} is {found!r}, which is not a subclass of rlframe.Agent.")
    config_cls = getattr(found, "config_cls", None)
    if not (isinstance(config_cls, type) and dataclasses.is_dataclass(config_cls)):
        raise UsageError(
            f"{name}: config_cls must be a dataclass, the class of the agent's config, got {config_cls!r}."
        )
    return found


def network_config_class(name: str | None) -> type | None:
    """Return the config class of a built-in network; None for the agent's default network and for `file.py:make_net`.

    Raises:
        UsageError: the name does not exist.
    """
    if name is None or is_file_name(name) or ":" in name:
        return None
    found: type = find(name, NETWORKS, "network", "file.py:make_net")
    return found


def network_factory(name: str | None, config: Any) -> Any:
    """Return the value of an agent's `net_factory`: the config of a built-in network, or the user's `make_net`.

    Return None for the agent's default network.
    """
    if name is None or ":" not in name:
        return config
    found = load_object(name, "network")
    if not takes(found, 2):
        raise UsageError(
            f"{name} is {found!r}; a network must be a function make_net(observation_spec, action_spec) that returns "
            "an object with init(rng, observation) and apply(params, observation)."
        )
    return found


def takes(function: Any, count: int) -> bool:
    """Return True if an object can be called with `count` positional arguments."""
    if not callable(function):
        return False
    try:
        signature = inspect.signature(function)
    except ValueError:  # a C function has no signature
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def env_name_or_builder(name: str) -> str | Callable[..., Any]:
    """Return the name unchanged if the environment comes from a library. Otherwise, load its class or function."""
    if is_library_env(name):
        return name
    found = load_object(name, "environment")
    has_api = all(hasattr(found, method) for method in ("reset", "step")) or hasattr(found, "__getattr__")
    if not callable(found) or (isinstance(found, type) and not has_api):
        raise UsageError(
            f"{name} is {found!r}. Expected a class of environments, which has reset() and step(), or a function that "
            "creates one environment."
        )
    return found


def is_library_env(name: str) -> bool:
    """Return True if `name` is an environment of a library, such as an id that is registered with Gymnasium."""
    return not (isinstance(name, ObjectName) or is_file_name(name) or is_live(name) or _is_in_module(name))


def _is_in_module(name: str) -> bool:
    """Return True if `name` is `module:NAME` for an existing class or function, and is not an id of Gymnasium."""
    module, _, attribute = name.rpartition(":")
    if not module or name.partition(":")[0] in PREFIXES or spec_of(name) is not None:
        return False
    return hasattr(load_module(module, "environment"), attribute.partition(".")[0])


# --- create the name of an object


def name_of(option: str, given: Any) -> Any:
    """Return the name of the class or function that the user gave for an option.

    Args:
        option: one of `OPTIONS`.
        given: a name or None. For agent, env and network, also a class or function. File paths become absolute.

    Returns:
        A built-in name, `file.py:NAME`, `module:NAME` or a live name.

    Raises:
        UsageError: the object has the wrong type.
    """
    if given is None or is_live(given) or isinstance(given, ObjectName):
        return given
    if isinstance(given, (str, os.PathLike)):
        return absolute_name(os.fspath(given))
    if option not in _WANTED:
        return given  # `change_options` checks this value later
    if not callable(given) or (option == "env" and _is_one_environment(given)):
        raise _not_nameable(option, given)
    name = object_name(given)
    tables = {"agent": AGENTS, "network": NETWORKS}
    ours = {where: each for each, where in tables.get(option, {}).items()}
    return ours.get(name, name)


def _is_one_environment(given: Any) -> bool:
    return not isinstance(given, type) and hasattr(given, "reset") and hasattr(given, "step")


def _not_nameable(option: str, given: Any) -> UsageError:
    kind = type(given).__name__
    wanted = f"{option} must be {_WANTED[option]}, or a name such as file.py:NAME"
    if option == "env" and _is_one_environment(given):
        spec = getattr(given, "spec", None)
        instead = kind if spec is None else repr(spec.id)
        return UsageError(
            f"{wanted}; got an instance of {kind}. A run creates several environments: pass env={instead}, or a "
            "function that creates one, such as env=lambda: ..."
        )
    if option == "agent" and hasattr(given, "config_cls"):
        return UsageError(f"{wanted}; got an instance. Pass agent={kind}, and the fields of its config as options.")
    if option == "network" and hasattr(given, "init") and hasattr(given, "apply"):
        return UsageError(
            f"{wanted}; got a network, an instance of {kind}. Pass a function that returns it: network=lambda "
            "observation_spec, action_spec: ..."
        )
    if option == "network" and hasattr(given, "build"):
        return UsageError(
            f"{wanted}; got a network's config. Pass its name, such as network='mlp', and network_config=..."
        )
    return UsageError(f"{wanted}; got {given!r}.")


def name_objects(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the options in which names replace classes and functions."""
    return {option: name_of(option, value) if option in OPTIONS else value for option, value in values.items()}


def replace_names(
    saved: dict[str, Any], config: pathlib.Path, given: Mapping[str, Any], replace: bool
) -> dict[str, Any]:
    """Return the fields of a saved config. Replace some names by given objects or by live objects of this process.

    Args:
        saved: fields of the config.
        config: path of the config.
        given: option -> object or name that replaces the saved name. By default, only live names are replaced.
        replace: if True, replace the other names too.
    """
    values = dict(saved)
    for field, name in saved.items():
        option = "topology" if field == "name" else field
        wanted = name_of(option, given.get(option)) if option in OPTIONS else None
        if wanted is not None and (replace or is_live(name) or wanted == name):
            values[field] = wanted
        elif option in OPTIONS and is_live(name):
            values[field] = recall_live_object(config, option, name)
    return values
