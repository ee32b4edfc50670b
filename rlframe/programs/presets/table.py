"""What a preset is, and families of environments that several of them name."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """One value of a preset, and where it is from."""

    value: Any
    source: str


@dataclasses.dataclass(frozen=True)
class Preset:
    """A table of settings for one agent on one family of environments.

    The key of a setting is a field of `Experiment` (`num_envs`), of the agent's config
    (`agent.learning_rate`) or of the network's (`network.hidden`).
    """

    name: str  # AGENT/FAMILY
    envs: tuple[str, ...]  # names or patterns, without prefix
    fields: Mapping[str, Setting]
    excluded_envs: tuple[str, ...] = ()
    automatic: bool = True  # whether `--preset auto` takes it; else it is asked for by its name

    @property
    def agent(self) -> str:
        """The agent that it is for."""
        return self.name.partition("/")[0]

    def fits(self, env: str) -> bool:
        """Whether the environment is of this family."""
        name = plain_name(env)
        return _matches(name, self.envs) and not _matches(name, self.excluded_envs)

    @property
    def options(self) -> dict[str, Any]:
        """Its values by option, as `change_options` takes them."""
        return {key.removeprefix("agent."): setting.value for key, setting in self.fields.items()}


def plain_name(env: str) -> str:
    """The environment's name without `gymnasium:`, `envpool:`, `dm_control:` and without a namespace (`ALE/`)."""
    return env.rpartition(":")[2].rpartition("/")[2]


def settings(source: str, /, **values: Any) -> dict[str, Setting]:
    """Settings that share a source; `agent__learning_rate` stands for the key `agent.learning_rate`."""
    return {key.replace("__", "."): Setting(value, source) for key, value in values.items()}


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# --- families of environments

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

# EnvPool's Atari tasks, and Gymnasium's under `ALE/`, are the only families at v5 besides MuJoCo.
ATARI = ("*-v5",)

# Training sees clipped rewards and a life as an episode (Mnih et al. 2015); evaluation plays whole games.
ATARI_TRAINING = {"episodic_life": True, "reward_clip": True}
ATARI_EVALUATION = {"episodic_life": False, "reward_clip": False}
