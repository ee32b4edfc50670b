"""The class `Preset`, families of environments, and general presets.

General presets have values for environments that no other preset fits, such as your own. The configs' defaults come
from papers whose runs take millions of steps. With the values below, a run of 20,000 steps makes many updates. They are
the defaults of other libraries, which are meant for unknown environments. Where these need long runs, our own choice is
named as such.
"""

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
    # names or patterns of environments that match `envs`, but do not use this preset
    excluded_envs: tuple[str, ...] = ()
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


SB3_PPO = "stable-baselines3, default of PPO"
SB3_DQN = "stable-baselines3, default of DQN"
SB3_SAC = "stable-baselines3, default of SAC"
SB3_TD3 = "stable-baselines3, default of TD3"
CLEANRL_DQN = "CleanRL, dqn.py"
CLEANRL_PQN = "CleanRL, pqn.py"
RLLIB_IMPALA = "RLlib, default of IMPALA"

PRESETS = (
    Preset(
        name="ppo/general",
        envs=EVERY,
        fields={
            **settings(
                SB3_PPO,
                agent__num_epochs=10,
                agent__discount=0.99,
                agent__gae_lambda=0.95,
                agent__learning_rate=3e-4,
                agent__clip_epsilon=0.2,
                agent__entropy_cost=0.0,
                agent__max_grad_norm=0.5,
            ),
            **settings("OpenAI Baselines, ppo2; SB3's 0.5 is for the full squared error", agent__value_cost=0.5),
            **settings("our choice: half of SB3's 2,048 steps per update", num_envs=8, agent__unroll_length=128),
            **settings(f"{SB3_PPO}: minibatches of 64 steps", agent__num_minibatches=16),
        },
    ),
    Preset(
        name="dqn/general",
        envs=EVERY,
        fields={
            **settings(SB3_DQN, num_envs=1, agent__update_period=4, agent__max_grad_norm=10.0, agent__optimizer="adam"),
            **settings(CLEANRL_DQN, agent__batch_size=128, agent__discount=0.99, agent__learning_rate=2.5e-4),
            **settings(
                f"{CLEANRL_DQN}: 500 steps; the share of the run counts from the first update",
                agent__target_update_period=125,
                agent__epsilon="linear:1:0.05@0.5",
            ),
            **settings("our choice", agent__replay_capacity=100_000, agent__min_replay_size=1_000),
        },
    ),
    Preset(
        name="sac/general",
        envs=EVERY,
        fields=settings(
            SB3_SAC,
            num_envs=1,
            agent__batch_size=256,
            agent__min_replay_size=100,
            agent__update_period=1,
            agent__discount=0.99,
            agent__learning_rate=3e-4,
            agent__target_update_rate=0.005,
        ),
    ),
    Preset(
        name="td3/general",
        envs=EVERY,
        fields={
            **settings(
                SB3_TD3,
                num_envs=1,
                agent__batch_size=256,
                agent__update_period=1,
                agent__discount=0.99,
                agent__learning_rate=1e-3,
                agent__target_update_rate=0.005,
                agent__policy_period=2,
                agent__smoothing_noise=0.2,
                agent__smoothing_clip=0.5,
            ),
            **settings("Fujimoto et al. 2018, for tasks whose episodes end early", agent__min_replay_size=1_000),
            **settings("Fujimoto et al. 2018", agent__exploration_noise=0.1),
        },
    ),
    Preset(
        name="pqn/general",
        envs=EVERY,
        fields={
            **settings(
                CLEANRL_PQN,
                num_envs=4,
                agent__num_epochs=4,
                agent__num_minibatches=4,
                agent__discount=0.99,
                agent__q_lambda=0.65,
                agent__learning_rate="linear:2.5e-4:0",
                agent__epsilon="linear:1:0.05@0.5",
                agent__max_grad_norm=10.0,
            ),
            **settings("our choice: a quarter of CleanRL's 128 steps", agent__unroll_length=32),
        },
    ),
    Preset(
        name="impala/general",
        envs=EVERY,
        fields={
            **settings(
                RLLIB_IMPALA,
                agent__optimizer="adam",
                agent__learning_rate=5e-4,
                agent__entropy_cost=0.01,
                agent__value_cost=0.5,
                agent__discount=0.99,
                agent__max_grad_norm=40.0,
            ),
            **settings("our choice: 160 of RLlib's 500 steps per update", num_envs=8, agent__batch_size=8),
            **settings("Espeholt et al. 2018, table G.1", agent__unroll_length=20),
        },
    ),
    Preset(
        name="r2d2/general",
        envs=EVERY,
        fields=settings(
            "our choice: the sizes of r2d2/position_only_cartpole",
            num_envs=8,
            agent__batch_size=32,
            agent__sequence_length=32,
            agent__burn_in=8,
            agent__period=16,
            agent__replay_capacity=100_000,
            agent__min_replay_size=100,
            agent__update_period=16,
            agent__target_update_period=300,
            agent__discount=0.99,
            agent__learning_rate=1e-3,
            agent__adam_epsilon=1e-5,
            agent__max_grad_norm=10.0,
        ),
    ),
)
