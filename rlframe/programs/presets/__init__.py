"""Presets: what makes an agent learn a family of environments quickly, each value with its source.

A class's defaults are its paper's; a preset is applied on top, printed when it is, and switched off by
`--preset none`. One file per agent holds its tables.
"""

from __future__ import annotations

from rlframe.errors import UsageError, suggest
from rlframe.programs.presets import dqn, grpo, impala, ppo
from rlframe.programs.presets.table import Preset, Setting, plain_name

PRESETS: tuple[Preset, ...] = (*ppo.PRESETS, *dqn.PRESETS, *impala.PRESETS, *grpo.PRESETS)


def find_preset(name: str, agent: str, env: str) -> Preset | None:
    """The preset to apply.

    Args:
        name: "auto" for the one that fits `agent` and `env` (None if there is none), "none", or a
            preset's name, which must be of this agent.
        agent: the agent's name.
        env: the environment's name, with or without a prefix such as `envpool:`.

    Raises:
        UsageError: there is no preset of this name for this agent.
    """
    if name == "none":
        return None
    if name == "auto":
        return next((preset for preset in PRESETS if preset.agent == agent and preset.fits(env)), None)
    known = {preset.name: preset for preset in PRESETS if preset.agent == agent}
    if name not in known:
        names = ", ".join(["auto", "none", *known])
        raise UsageError(
            f"There is no preset {name!r} for {agent}; there are {names}.{suggest(name, names.split(', '))}"
        )
    return known[name]


__all__ = ["PRESETS", "Preset", "Setting", "find_preset", "plain_name"]
