"""`rlframe envs` and `rlframe agents`: the names that `rlframe train` accepts, and the tables of presets."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from typing import Annotated, Any, TextIO

import tyro

from rlframe.cli.parsing import CommandOptions, parse
from rlframe.errors import UsageError, suggest
from rlframe.metrics.terminal import console, table
from rlframe.programs.options import registry
from rlframe.programs.options.fields import option_values, to_jsonable
from rlframe.programs.options.make_experiment import option_value
from rlframe.programs.presets import PRESETS, Preset

_ENVS = (
    "List the names of available environments. A name is looked up in this order: ids that you registered, EnvPool "
    "tasks, Gymnasium ids. "
    "A prefix selects the library: `gymnasium:NAME`, `envpool:NAME`, `dm_control:NAME`, `jax:NAME`, `gymnax:NAME`, "
    "`jumanji:NAME`. To use your own environment, write file.py:make_env."
)
_AGENTS = "List the agents with their options and presets. To use your own agent, write file.py:Class."


@dataclasses.dataclass(frozen=True)
class EnvsOptions(CommandOptions):
    """Options of `rlframe envs`."""

    pattern: Annotated[str, tyro.conf.Positional] = ""  # only names that contain this text, ignoring case
    json: bool = False  # print a JSON list of {"name", "backend"}


def envs(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    options = parse(EnvsOptions, arguments, "rlframe envs", _ENVS)
    from rlframe.envs import list_envs

    with warnings.catch_warnings():  # dm_control warns on machines without a display
        warnings.simplefilter("ignore")
        every = list_envs()
    rows = [(name, backend) for name, backend in every if options.pattern.lower() in name.lower()]
    if not rows:
        near = suggest(options.pattern, {name for name, _ in every})
        raise UsageError(f"No environment has {options.pattern!r} in its name.{near}")
    if options.json:
        print(json.dumps([{"name": name, "backend": backend} for name, backend in rows]))
        return 0
    width = max(len(name) for name, _ in rows)
    for name, backend in rows:
        print(f"{name:{width}}  {backend}")
    return 0


@dataclasses.dataclass(frozen=True)
class AgentsOptions(CommandOptions):
    """Options of `rlframe agents`."""

    agent: Annotated[str, tyro.conf.Positional] = ""  # show only this agent, with all its options and presets
    json: bool = False  # print a JSON object: agent name -> defaults of its options, and its presets


def agents(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    options = parse(AgentsOptions, arguments, "rlframe agents", _AGENTS)
    names = [options.agent] if options.agent else sorted(registry.AGENTS)
    if options.json:
        print(json.dumps({name: _description(name) for name in names}))
        return 0
    for name in names:
        _print_agent(name, every=bool(options.agent))
    return 0


def _description(name: str) -> dict[str, object]:
    config_cls = registry.agent_class(name).config_cls
    presets = {
        preset.name: {key: to_jsonable(setting.value) for key, setting in preset.fields.items()}
        for preset in PRESETS
        if preset.agent == name
    }
    return {"options": to_jsonable(config_cls()), "presets": presets}


def _print_agent(name: str, *, every: bool) -> None:
    agent_cls = registry.agent_class(name)
    summary = (agent_cls.__doc__ or "").strip().split("\n")[0]
    print(f"{name}: {summary}")
    presets = [preset for preset in PRESETS if preset.agent == name]
    if not every:
        print(f"  presets: {', '.join(preset.name for preset in presets) or 'none'}")
        print(f"  `rlframe agents {name}` shows its options\n")
        return
    config = agent_cls.config_cls()
    print("\noptions of `rlframe train`, with the defaults of the agent's config:")
    for name, value in option_values(config).items():
        print(f"  --{name.replace('_', '-'):26} {getattr(value, 'name', value)}")
    for preset in presets:
        print(f"\nfor {'all other environments' if preset.is_general else ', '.join(preset.envs)}:", flush=True)
        print_preset(preset, None, sys.stdout)


def print_preset(preset: Preset, experiment: Any, file: TextIO) -> None:
    """Print a preset's values and their sources. Mark values that the command line changed.

    If the network is not the network of the preset, skip the network options of the preset, which are not used.

    Args:
        preset: the preset.
        experiment: the experiment to run; None if the preset is only listed.
        file: the output stream.
    """
    rows = []
    network = preset.fields.get("network")
    has_its_network = experiment is None or network is None or option_value(experiment, "network") == network.value
    for key, setting in preset.fields.items():
        if key.startswith("network.") and not has_its_network:
            continue
        used = setting.value if experiment is None else option_value(experiment, key.removeprefix("agent."))
        same = used == setting.value
        value = str(setting.value) if same else f"{used} (preset: {setting.value})"
        rows.append((key.removeprefix("agent."), value, setting.source if same else "command line"))
    console(file).print(table(("field", "value", "source"), rows, title=f"preset {preset.name}"))
