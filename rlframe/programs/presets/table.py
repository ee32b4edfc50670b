"""The class `Preset`, and families of environments that several presets use."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """A value of a preset, and its source."""

    value: Any
    source: str


@dataclasses.dataclass(frozen=True)
class Preset:
    """A table of settings for one agent on one family of environments.

    The keys are fields of `Experiment` (`num_envs`), of the agent's config (`agent.learning_rate`) or of the network's
    config (`network.hidden`).
    """

    name: str  # AGENT/FAMILY
    envs: tuple[str, ...]  # names or patterns, without prefixes
    fields: Mapping[str, Setting]
    excluded_envs: tuple[
        str, ...
    ] = ()  # names or patterns of environments that match `envs`, but do not use this preset
    automatic: bool = True  # False means that only `--preset NAME` applies this preset

    @property
    def agent(self) -> str:
        """Name of the agent."""
        return self.name.partition("/")[0]

    def fits(self, env: str) -> bool:
        """Return True if the preset is for this environment."""
        name = plain_name(env)
        return _matches(name, self.envs) and not _matches(name, self.excluded_envs)

    @property
    def is_general(self) -> bool:
        """True for the preset of environments that no other preset of the agent fits."""
        return self.envs == EVERY

    @property
    def options(self) -> dict[str, Any]:
        """The preset as a dict: option -> value, for `change_options`."""
        return {key.removeprefix("agent."): setting.value for key, setting in self.fields.items()}


def plain_name(env: str) -> str:
    """Return a name without a prefix such as `gymnasium:` or `jax:` and without a namespace (`ALE/`)."""
    return env.rpartition(":")[2].rpartition("/")[2]


def settings(source: str, /, **values: Any) -> dict[str, Setting]:
    """Return several settings that have the same source. `agent__learning_rate=1` sets `agent.learning_rate`."""
    return {key.replace("__", "."): Setting(value, source) for key, value in values.items()}


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# --- families of environments

EVERY = ("*",)

MUJOCO = tuple(
    f"{robot}-v[2-5]"
    for robot in (
        "Ant",
        "HalfCheetah",
        "Hopper",
        "Humanoid",
        "HumanoidStandup",
        "InvertedDoublePendulum",
        "InvertedPendulum",
        "Pusher",
        "Reacher",
        "Swimmer",
        "Walker2d",
    )
)

# Atari tasks of EnvPool and Gymnasium (`ALE/`) have version 5. Only MuJoCo has other tasks with version 5.
ATARI = ("*-v5",)

# Small versions of Atari games, on grids of 10 x 10 (Young and Tian 2019, arXiv:1903.03176).
MINATAR = ("*-MinAtar",)

# Training uses clipped rewards and one life per episode (Mnih et al. 2015). Evaluation plays complete games.
ATARI_TRAINING = {"episodic_life": True, "reward_clip": True}
ATARI_EVALUATION = {"episodic_life": False, "reward_clip": False}
