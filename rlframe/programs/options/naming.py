"""From a name to the class or function that it means: a name of ours, `file.py:NAME`, `module:NAME`, or a live one.

A live name stands for an object that no file defines: `__main__:NAME` is defined in a notebook or another interactive
session, `__live__:NAME` is a lambda, a local class, a partial or another object that only its own process has.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlframe.envs.names import PREFIXES
from rlframe.envs.registered import spec_of
from rlframe.errors import UsageError, suggest
from rlframe.user_files import import_module, load_file

if TYPE_CHECKING:
    from rlframe.agents import Agent
    from rlframe.engines import Engine

# Name -> what it means, as `load_object` takes it. What is a user's own needs no entry: it is named by its file.
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
# Made by `add_replay` in `rlframe/programs/topologies/parts.py`; for elastic by `add_elastic_replay`.
REPLAYS = ("local", "shared_memory", "service", "reverb")
OPERATORS = {
    "local": "rlframe.coordinator.operators.local:LocalOperator",
    "ray": "rlframe.coordinator.operators.ray:RayOperator",
}
# By what agents learn from (`Agent.learns_from`); the first one is the default.
TOPOLOGIES = {
    "steps": {
        "single_process": "rlframe.programs.topologies.single_process:single_process",
        "heavy_env": "rlframe.programs.topologies.heavy_env:heavy_env",
        "light_env": "rlframe.programs.topologies.light_env:light_env",
        "distributed": "rlframe.programs.topologies.light_env:distributed",
        "elastic": "rlframe.programs.topologies.elastic:elastic",
    },
    "trajectories": {"light_env": "rlframe.programs.topologies.language:language"},
}

MAIN, LIVE = "__main__", "__live__"  # the places of live names


class ObjectName(str):
    """A name together with its object: this process uses the object, another process loads it by the name."""

    target: Any

    def __new__(cls, name: str, target: Any) -> ObjectName:
        """Make the name of `target`."""
        made = super().__new__(cls, name)
        made.target = target
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)

    def __deepcopy__(self, memo: Any) -> ObjectName:
        return self


def find(name: str, table: Mapping[str, str], what: str, form: str = "file.py:Class") -> Any:
    """The class or function that a name of `table`, or one of the user's own, means.

    Raises:
        UsageError: there is none.
    """
    if name not in table and not is_file_name(name) and ":" not in name:
        raise UsageError(
            f"There is no {what} {name!r}; there are {', '.join(sorted(table))}, or one of your own as {form}."
            f"{suggest(name, table)}"
        )
    return load_object(table.get(name, name), what)


def engine_class(name: str) -> type[Engine]:
    """The `rlframe.engines.Engine` that a name or `file.py:Class` means. Raises UsageError if there is none."""
    found = find(name, ENGINES, "engine")
    if not (isinstance(found, type) and hasattr(found, "add") and hasattr(found, "run")):
        raise UsageError(f"{name} is {found!r}, which is no rlframe.engines.Engine: that has add(), run() and others.")
    return found


def operator_class(name: str) -> Any:
    """The coordinator's operator that a name or `file.py:Class` means. Raises UsageError if there is none."""
    return find(name, OPERATORS, "operator")


def agent_class(name: str) -> type[Agent]:
    """The `Agent` subclass that a name or `file.py:Class` means.

    Raises:
        UsageError: there is none, or it is no Agent.
    """
    found = find(name, AGENTS, "agent")
    from rlframe.agents import Agent

    if not (isinstance(found, type) and issubclass(found, Agent)):
        raise UsageError(f"{name} is {found!r}, which is not a subclass of rlframe.Agent.")
    config_cls = getattr(found, "config_cls", None)
    if not (isinstance(config_cls, type) and dataclasses.is_dataclass(config_cls)):
        raise UsageError(f"{name}: config_cls must be the dataclass of the agent's config, got {config_cls!r}.")
    return found


def network_config_class(name: str | None) -> type | None:
    """The dataclass of a named network's options; None for the agent's own network and for `file.py:make_net`.

    Raises:
        UsageError: there is no network of this name.
    """
    if name is None or is_file_name(name) or ":" in name:
        return None
    found: type = find(name, NETWORKS, "network", "file.py:make_net")
    return found


def network_factory(name: str | None, config: Any) -> Any:
    """An agent's `net_factory`: a named network's config, or what `file.py:make_net` names; None: the agent's own."""
    if name is None or ":" not in name:
        return config
    found = load_object(name, "network")
    if not takes(found, 2):
        raise UsageError(
            f"{name} is {found!r}; a network must be a function make_net(observation_spec, action_spec), which returns "
            "an object with init(rng, observation) and apply(params, observation)."
        )
    return found


def takes(function: Any, count: int) -> bool:
    """Whether an object can be called with so many arguments without their names."""
    if not callable(function):
        return False
    try:
        signature = inspect.signature(function)
    except ValueError:  # of C: it has none
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def env_name_or_builder(name: str) -> str | Callable[..., Any]:
    """Return a name of `rlframe.envs.names` unchanged, or the class or function that any other name means."""
    if is_library_env(name):
        return name
    found = load_object(name, "environment")
    has_api = all(hasattr(found, method) for method in ("reset", "step")) or hasattr(found, "__getattr__")
    if not callable(found) or (isinstance(found, type) and not has_api):
        raise UsageError(
            f"{name} is {found!r}. Expected a class of environments, which has reset() and step(), or a function that "
            "makes one environment."
        )
    return found


def is_library_env(name: str) -> bool:
    """Whether a name is that of a library's environment, or of one that is registered with Gymnasium."""
    return not (isinstance(name, ObjectName) or is_file_name(name) or is_live(name) or _is_in_module(name))


def _is_in_module(name: str) -> bool:
    """Whether an environment's name is `module:NAME` of a class or function, not `module:Id` of Gymnasium."""
    module, _, attribute = name.rpartition(":")
    if not module or name.partition(":")[0] in PREFIXES or spec_of(name) is not None:
        return False
    return hasattr(_load_module(module, "environment"), attribute.partition(".")[0])


def is_file_name(name: str) -> bool:
    """Whether a name is `file.py:NAME`. Raises UsageError for a file without :NAME."""
    source, _, attribute = name.rpartition(":")
    if name.endswith(".py") or (source.endswith(".py") and not attribute):
        raise UsageError(f"{name!r} names a file, but nothing in it: write {_example(name.rstrip(':'))}.")
    return source.endswith(".py")


def _example(file: str) -> str:
    """`file.py:NAME`, with the names that the file defines, if it can be read."""
    with contextlib.suppress(OSError, ValueError, SyntaxError):
        defined = (ast.ClassDef, ast.FunctionDef)
        tree = ast.parse(pathlib.Path(file).read_bytes())
        names = [node.name for node in tree.body if isinstance(node, defined) and not node.name.startswith("_")]
        if names:
            return " or ".join(f"{file}:{name}" for name in names[-3:])
    return f"{file}:NAME"


def load_object(name: str, what: str) -> Any:
    """What `file.py:Name` or `package.module:Name` names.

    Args:
        name: the file (relative to the working directory) or module, a colon, and a name in it.
        what: named in errors: agent, network, environment.

    Raises:
        UsageError: no such file or name, or the file does not import.
    """
    if isinstance(name, ObjectName):
        return name.target
    if is_live(name):
        return find_live(name, what)
    source, _, attribute = name.rpartition(":")
    if not is_file_name(name) and not (source and attribute):
        raise UsageError(f"The {what} {name!r} should read file.py:Name.")
    module = load_file(pathlib.Path(source), what) if source.endswith(".py") else _load_module(source, name)
    try:
        return attribute_of(module, attribute)
    except AttributeError:
        names = [each for each in vars(module) if not each.startswith("_")]
        raise UsageError(f"{source} defines no {attribute!r}.{suggest(attribute, names)}") from None


def absolute_name(name: str) -> str:
    """`name` with the path of a `file.py:Name` made absolute, so that it means the same from every directory."""
    source, colon, attribute = name.rpartition(":")
    return f"{os.path.abspath(source)}:{attribute}" if colon and source.endswith(".py") else name


def _load_module(module: str, name: str) -> ModuleType:
    main = sys.modules["__main__"]
    if getattr(getattr(main, "__spec__", None), "name", None) == module:
        return main  # as `load_file`, of `python -m package.module`
    return import_module(module, name)


# --- live names


def is_live(name: Any) -> bool:
    """Whether a name is that of an object which only its own process has."""
    return isinstance(name, str) and name.partition(":")[0] in (MAIN, LIVE)


def find_live(name: str, what: str) -> Any:
    """Find what a live name means in this process; `what` (agent, network, environment) is named in the error.

    Raises:
        UsageError: this process has no such object.
    """
    place, _, label = name.partition(":")
    if place == MAIN:
        with contextlib.suppress(AttributeError):
            return attribute_of(sys.modules[MAIN], label)
    option = "env" if what == "environment" else what
    where, again = "the Python process that used it", "Pass"
    if place == MAIN:
        where, again = "a notebook or another interactive session", "Define it in this session, or pass"
    raise UsageError(
        f"The {what} {label} was defined in {where}, not in a file. {again} the class or function as {option}=... . "
        f'For the command line move it to a file, and put "{option}": "/path/to/file.py:{label}" into the config.json '
        "of the run."
    )


def attribute_of(module: Any, attribute: str) -> Any:
    """Get `Name` or `Outer.Inner` of a module. Raises AttributeError if there is none."""
    return functools.reduce(getattr, attribute.split("."), module)
