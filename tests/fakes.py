"""Simple fakes for tests: an agent, an environment, a buffer and a learner. Their results are easy to calculate."""

from __future__ import annotations

import dataclasses

import dm_env
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlframe.agents import Agent
from rlframe.metrics import CallbackLogger
from rlframe.types import AgentOutput, Batch, ReplaySpec, Transition, TransitionBatch


@dataclasses.dataclass(frozen=True)
class CountingConfig:
    learning_rate: float = 0.5
    prioritized: bool = False


class CountingAgent(Agent):
    """An agent whose action is always 0. It counts its steps in its state and learns `w`, the mean reward."""

    config_cls = CountingConfig

    def initial_params(self, rng):
        del rng
        return {"w": jnp.zeros(())}

    def initial_state(self, batch_size):
        return {"seen": np.zeros((batch_size,), np.float32)}

    def actor_step(self, rng, params, timestep, state):
        del rng
        seen = state["seen"] + 1.0
        batch_size = timestep.reward.shape[0]
        return AgentOutput(jnp.zeros((batch_size,), jnp.int32), {"w": jnp.full((batch_size,), params["w"])}), {
            "seen": seen
        }

    @property
    def replay_spec(self):
        return ReplaySpec("prioritized" if self.cfg.prioritized else "uniform", Transition(1, 1.0), 4, capacity=100)

    def learner_step(self, params, learner_state, batch):
        error = jnp.mean(batch.data.reward) - params["w"]
        params = {"w": params["w"] + self.cfg.learning_rate * error}
        logs = {"loss": error**2}
        if self.cfg.prioritized:
            logs["priorities"] = jnp.abs(batch.data.reward)
        return params, learner_state._replace(steps=learner_state.steps + 1), logs

    def make_optimizer(self):
        import optax

        return optax.sgd(1.0)


OBSERVATION_SPEC = specs.Array((2,), np.float32, "observation")
ACTION_SPEC = specs.DiscreteArray(3, np.int32, "action")


def counting_agent(**config) -> CountingAgent:
    return CountingAgent(CountingConfig(**config), OBSERVATION_SPEC, ACTION_SPEC)


def reward_batch(rewards, versions=0) -> Batch:
    """Return a batch of one-step transitions with the given rewards."""
    rewards = np.asarray(rewards, np.float32)
    count = len(rewards)
    observation = np.zeros((count, 2), np.float32)
    data = TransitionBatch(
        observation, np.zeros(count, np.int32), rewards, np.ones(count, np.float32), observation, {"w": rewards}
    )
    keys = np.stack([np.zeros(count), np.zeros(count), np.arange(count)], axis=1).astype(np.int64)
    return Batch(data, keys, np.full(count, 0.25, np.float32), np.full(count, versions, np.int64))


class CountingEnv(dm_env.Environment):
    """An environment with episodes of `length` steps and reward 1.

    An observation is (index of the step in the episode, index of the episode).
    """

    def __init__(self, length: int = 3, truncated: bool = False) -> None:
        self._length, self._truncated = length, truncated
        self._count, self._episode = 0, -1

    def reset(self):
        self._count, self._episode = 0, self._episode + 1
        return dm_env.restart(self._observation())

    def step(self, action):
        del action
        self._count += 1
        if self._count == self._length:
            end = dm_env.truncation if self._truncated else dm_env.termination
            return end(1.0, self._observation())
        return dm_env.transition(1.0, self._observation())

    def observation_spec(self):
        return OBSERVATION_SPEC

    def action_spec(self):
        return ACTION_SPEC

    def _observation(self):
        return np.array([self._count, self._episode], np.float32)


class RecordingBuffer:
    """A fake replay buffer that records all added steps, updated priorities and claimed ranks."""

    def __init__(self) -> None:
        self.steps = []
        self.priorities = []
        self.claims = []

    def claim_rank(self, num_envs=None, rank=None):
        self.claims.append(rank)
        return (0 if rank is None else rank), self.claims.count(rank) - 1

    def open_segment(self, rank, num_envs):
        self.segment = (rank, num_envs)

    def add(self, env_ids, step):
        self.steps.append((env_ids.copy(), step))

    def update_priorities(self, keys, priorities):
        self.priorities.append((keys, priorities))


class FixedParams:
    """A fake learner with fixed parameters. `asked` is the number of calls of `get_params`."""

    def __init__(self, params) -> None:
        self.version, self.params, self.asked = 1, params, 0

    def get_params(self, known_version=-1):
        self.asked += 1
        return self.version, (None if known_version == self.version else self.params)


class ProgressRecorder(CallbackLogger):
    """Records the rows and the activities that a progress display receives."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, ...]] = []
        self.activities: list[str] = []
        super().__init__(lambda step, values: self.rows.append(tuple(values)))

    def show(self, activity: str) -> None:
        self.activities.append(activity)
