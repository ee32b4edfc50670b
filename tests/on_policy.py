"""Helpers for on-policy tests: an agent and a learner that record the age of the parameters that chose the actions."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from rlframe import Actor, Inferencer, InferencerConfig, Learner, SyncEnv
from rlframe.agents import PPO, PPOConfig
from rlframe.handles import Remote

NUM_ENVS = 4


class RecordingPPO(PPO):
    """A PPO agent. The extra `updates` of each step is the number of updates before the parameters that acted."""

    @property
    def replay_spec(self) -> Any:
        return dataclasses.replace(super().replay_spec, lapse_after=2.0)

    def actor_params(self, params: Any, learner_state: Any) -> Any:
        return {"params": params, "updates": learner_state.steps}

    def actor_step(self, rng: Any, params: Any, timestep: Any, state: Any) -> Any:
        output, state = super().actor_step(rng, params["params"], timestep, state)
        updates = jnp.full(timestep.reward.shape, params["updates"])
        return output._replace(extras={**output.extras, "updates": updates}), state


class Learned(NamedTuple):
    """A record of one learner update."""

    version: int  # version of the learner's parameters before the update
    versions: list[int]  # distinct versions of the parameters that chose the actions in the batch
    behind: list[int]  # distinct ages of the parameters that chose the actions, in updates
    ranks: list[int]  # rank of each item's writer, sorted


class RecordingLearner(Learner):
    """A learner that records each update."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.learned: list[Learned] = []

    def step(self, batch: Any) -> Any:
        version, behind = self.params_version, self.learner_steps - np.unique(batch.data.extras["updates"])
        logs = super().step(batch)
        if logs is not None:
            versions, ranks = np.unique(batch.params_version), batch.keys[:, 0]
            self.learned.append(Learned(version, versions.tolist(), behind.tolist(), sorted(ranks.tolist())))
        return logs


def env_builder(seed: int = 0) -> SyncEnv:
    return SyncEnv("gymnasium:CartPole-v1", NUM_ENVS, "loop", seed=seed)


def make_agent(**config: Any) -> RecordingPPO:
    cfg = PPOConfig(
        unroll_length=16,
        num_epochs=2,
        num_minibatches=6,
        # 6 does not divide the 64 or 128 steps of a batch, so the minibatches have different sizes.
    )
    env = env_builder()
    agent = RecordingPPO(dataclasses.replace(cfg, **config), env.observation_spec, env.action_spec)
    env.close()
    return agent


def make_actor(agent: Any, addresses: list[str], replay_buffer: Any, is_service: bool) -> Actor:
    """Return an actor. If `is_service`, `addresses` are inferencers. If not, they are learners for a new inferencer."""
    remote: Any = Remote(addresses, "inferencer" if is_service else "learner")
    inferencer = remote if is_service else Inferencer(InferencerConfig(), agent, remote)
    return Actor(env_builder, inferencer, replay_buffer)
