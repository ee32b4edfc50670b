"""Presets: what makes an agent learn a family of environments quickly, each value with its source.

A class's defaults are its paper's; a preset is applied on top, printed when it is, and switched off by
`--preset none`. One file holds the tables of an agent, or of agents of a kind.
"""

from __future__ import annotations

from rlframe.errors import UsageError, suggest
from rlframe.programs.options import registry
from rlframe.programs.presets import actor_critic, continuous, grpo, q_learning
from rlframe.programs.presets.table import Preset, Setting, plain_name

PRESETS: tuple[Preset, ...] = (
    *actor_critic.PRESETS,
    *q_learning.PRESETS,
    *grpo.PRESETS,
    *continuous.PRESETS,
)


def find_preset(name: str, agent: str, env: str) -> Preset | None:
    """Return the preset to apply.

    Args:
        name: "auto" for the one that fits `agent` and `env` (None if there is none), "none", or a
            preset's name, which must be of this agent or of one that it is a subclass of.
        agent: the agent's name, or `file.py:Class`.
        env: the environment's name, with or without a prefix such as `envpool:`.

    Raises:
        UsageError: there is no preset of this name for this agent.
    """
    if name == "none":
        return None
    if name == "auto":
        fitting = (preset for preset in PRESETS if preset.agent == agent and preset.fits(env))
        return next((preset for preset in fitting if preset.automatic), None)
    known = {preset.name: preset for preset in PRESETS if _is_kind_of(agent, preset.agent)}
    if name not in known:
        names = ", ".join(["auto", "none", *known])
        raise UsageError(
            f"There is no preset {name!r} for {agent}; there are {names}.{suggest(name, names.split(', '))}"
        )
    return known[name]


def _is_kind_of(agent: str, named: str) -> bool:
    """Return True if an agent is the one of this name, or a user's own subclass of it."""
    return agent == named or (":" in agent and issubclass(registry.agent_class(agent), registry.agent_class(named)))


__all__ = ["PRESETS", "Preset", "Setting", "find_preset", "plain_name"]
