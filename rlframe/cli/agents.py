"""`rlframe agents`."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import tyro

from rlframe.cli.parsing import parse
from rlframe.programs import naming
from rlframe.programs.jsonable import to_jsonable
from rlframe.programs.presets import PRESETS

PROG = "rlframe agents"
DESCRIPTION = "List the agents with their options and presets. An agent of your own is file.py:Class."


@dataclasses.dataclass(frozen=True)
class AgentsOptions:
    """Options of `rlframe agents`."""

    agent: Annotated[str, tyro.conf.Positional] = ""  # only this one, with every option and preset
    json: bool = False  # print a JSON object: name -> its options' defaults and its presets
    traceback: bool = False  # show where an error came from


def run(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    options = parse(AgentsOptions, arguments, PROG, DESCRIPTION)
    names = [options.agent] if options.agent else sorted(naming.AGENTS)
    if options.json:
        print(json.dumps({name: _description(name) for name in names}))
        return 0
    for name in names:
        _print_agent(name, every=bool(options.agent))
    return 0


def _description(name: str) -> dict[str, object]:
    config_cls = naming.agent_class(name).config_cls
    presets = {
        preset.name: {key: to_jsonable(setting.value) for key, setting in preset.fields.items()}
        for preset in PRESETS
        if preset.agent == name
    }
    return {"options": to_jsonable(config_cls()), "presets": presets}


def _print_agent(name: str, *, every: bool) -> None:
    from rlframe.cli.tables import print_preset

    agent_cls = naming.agent_class(name)
    summary = (agent_cls.__doc__ or "").strip().split("\n")[0]
    print(f"{name}: {summary}")
    presets = [preset for preset in PRESETS if preset.agent == name]
    if not every:
        print(f"  presets: {', '.join(preset.name for preset in presets) or 'none'}")
        print(f"  `{PROG} {name}` shows its options\n")
        return
    config = agent_cls.config_cls()
    print("\noptions of `rlframe train`, with the class's defaults:")
    for field in dataclasses.fields(config):
        print(f"  --{field.name.replace('_', '-'):26} {getattr(config, field.name)}")
    for preset in presets:
        print(f"\nfor {', '.join(preset.envs)}:", flush=True)
        print_preset(preset, None, sys.stdout)
