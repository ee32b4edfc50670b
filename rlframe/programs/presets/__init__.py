"""Presets: tuned hyperparameters for an agent on a family of environments, each with its source.

The defaults of a config class come from its paper. A preset replaces some of them. `rlframe train` prints the preset
that it applies; `--preset none` turns presets off. Each file contains the presets of similar agents.
"""

from __future__ import annotations

from rlframe.errors import UsageError, suggest
from rlframe.programs.options import registry
from rlframe.programs.presets import actor_critic, grpo, q_learning, table
from rlframe.programs.presets.table import Preset, Setting, plain_name

PRESETS: tuple[Preset, ...] = (
    *actor_critic.PRESETS,
    *q_learning.PRESETS,
    *grpo.PRESETS,
    *table.PRESETS,  # last, because they fit every environment
)


def find_preset(name: str, agent: str, env: str) -> Preset | None:
    """Return the preset to apply.

    Args:
        name: "auto" for the first preset that fits `agent` and `env`, "none", or the name of a preset for this agent
            or one of its base classes. An agent of a user, and GRPO, have no preset that fits every environment, so
            "auto" may find None.
        agent: name of the agent, or `file.py:Class`.
        env: name of the environment, with or without a prefix such as `envpool:`.

    Raises:
        UsageError: the agent has no preset of this name.
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
            f"There is no preset {name!r} for {agent}; presets are {names}.{suggest(name, names.split(', '))}"
        )
    return known[name]


def _is_kind_of(agent: str, named: str) -> bool:
    """Return True if `named` is the agent's name, or the name of a built-in agent that it is a subclass of."""
    return agent == named or (":" in agent and issubclass(registry.agent_class(agent), registry.agent_class(named)))


__all__ = ["PRESETS", "Preset", "Setting", "find_preset", "plain_name"]
