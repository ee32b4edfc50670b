"""Tests of the steps that an Actor adds to the buffer, in an environment with known steps."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from rlframe import AsyncEnv, SyncEnv
from rlframe.actors import Actor
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.types import FIRST, LAST, MID, global_env_ids
from tests.fakes import (
    ACTION_SPEC,
    OBSERVATION_SPEC,
    CountingAgent,
    CountingConfig,
    CountingEnv,
    FixedParams,
    RecordingBuffer,
    counting_agent,
)


def inferencer() -> Inferencer:
    return Inferencer(InferencerConfig(), counting_agent(), FixedParams({"w": np.float32(0.5)}))


def sync_actor(buffer, size=2, **kwargs) -> Actor:
    return Actor(lambda: SyncEnv(CountingEnv, size, "loop"), inferencer(), buffer, **kwargs)


def test_added_step_contains_timestep_action_and_next_timestep():
    buffer = RecordingBuffer()
    actor = sync_actor(buffer)
    for _ in range(4):
        actor.step()
    env_ids, first = buffer.steps[0]
    np.testing.assert_array_equal(env_ids, global_env_ids(0, np.arange(2)))
    np.testing.assert_array_equal(first.timestep.step_type, [FIRST, FIRST])
    np.testing.assert_array_equal(first.next_timestep.observation[:, 0], [1, 1])
    np.testing.assert_array_equal(first.agent_output.extras["w"], np.full(2, 0.5, np.float32))
    assert first.params_version == 1
    types = [step.timestep.step_type[0] for _, step in buffer.steps]
    assert types == [FIRST, MID, MID, LAST]
    for (_, step), (_, after) in zip(buffer.steps, buffer.steps[1:], strict=False):
        assert step.next_timestep is after.timestep
    actor.close()


def test_agent_state_before_each_step_is_added_and_reset_at_first():
    buffer = RecordingBuffer()
    actor = sync_actor(buffer)
    for _ in range(6):
        actor.step()
    assert [step.agent_state["seen"][0] for _, step in buffer.steps] == [0, 1, 2, 3, 0, 1]
    actor.close()


class NumberedAgent(CountingAgent):
    """An agent whose state at FIRST is the index of the environment."""

    def initial_state(self, batch_size):
        return {"seen": np.arange(batch_size, dtype=np.float32)}


def test_initial_agent_state_depends_on_the_environment_index():
    buffer, agent = RecordingBuffer(), NumberedAgent(CountingConfig(), OBSERVATION_SPEC, ACTION_SPEC)
    numbered = Inferencer(InferencerConfig(), agent, FixedParams({"w": np.float32(0.5)}))
    actor = Actor(lambda: SyncEnv(CountingEnv, 2, "loop"), numbered, buffer, rank=2, num_pools=2)
    for _ in range(5):
        actor.step()
    seen = [step.agent_state["seen"].tolist() for _, step in buffer.steps]
    assert seen[:2] == [[8, 9], [10, 11]] and seen[2:4] == [[9, 10], [11, 12]]
    assert seen[-2:] == seen[:2]  # the next episodes start with the same states
    actor.close()


def test_logs_report_ended_episodes_and_ignored_actions_are_not_counted():
    actor = sync_actor(RecordingBuffer(), size=1)
    logs = [actor.step() for _ in range(4)]
    assert logs == [None, None, {"episode_return": 3.0, "episode_length": 3.0, "episodes": 1}, None]
    assert actor.env_steps == 3 and actor.episodes == 1
    actor.close()


# With wait_num=3, the second batch contains two environments that received an action before, and one that did not.
@pytest.mark.parametrize("wait_num", [1, 2, 3, 4])
def test_asynchronous_pool_adds_the_same_steps_for_every_environment(wait_num):
    buffer = RecordingBuffer()
    actor = Actor(lambda: AsyncEnv(CountingEnv, 4, wait_num, "thread"), inferencer(), buffer)
    while min((sum(i in ids for ids, _ in buffer.steps) for i in range(4)), default=0) < 6:
        actor.step()
    for env in range(4):
        rows = [(step, list(ids).index(env)) for ids, step in buffer.steps if env in ids]
        assert [int(step.timestep.observation[row, 0]) for step, row in rows][:6] == [0, 1, 2, 3, 0, 1]
        assert [int(step.next_timestep.observation[row, 0]) for step, row in rows][:6] == [1, 2, 3, 0, 1, 2]
        assert [step.agent_state["seen"][row] for step, row in rows][:6] == [0, 1, 2, 3, 0, 1]
    actor.close()


def test_environments_are_seeded_even_if_the_env_builder_has_no_seed_parameter():
    buffer = RecordingBuffer()
    for seed, rank in ((1, 0), (1, 1), (2, 0), (1, 0)):
        actor = Actor(lambda: gymnasium.make("CartPole-v1"), cartpole_inferencer(), buffer, rank=rank, seed=seed)
        actor.step()
        actor.close()
    first = [tuple(step.timestep.observation[0].tolist()) for _, step in buffer.steps]
    assert len(set(first)) == 4  # the last actor has a new seed because it is incarnation 1


def test_environment_seeds_depend_on_seed_rank_and_incarnation():
    seeds = []

    def builder(seed):
        seeds.append(seed)
        return SyncEnv(CountingEnv, 1, "loop", seed=seed)

    buffer = RecordingBuffer()
    for seed, rank in ((1, 0), (1, 0), (1, 1), (2, 3), (1, 2)):
        Actor(builder, inferencer(), buffer, rank=rank, seed=seed).close()
    assert len(set(seeds)) == 5
    Actor(builder, inferencer(), RecordingBuffer(), rank=0, seed=1).close()
    assert seeds[-1] == seeds[0]


def test_single_environment_becomes_a_pool_of_size_one():
    buffer = RecordingBuffer()
    actor = Actor(CountingEnv, inferencer(), buffer)
    actor.step()
    assert buffer.segment == (0, 1)
    actor.close()


class StoppingLogger:
    """A logger that stops its actor after `count` calls of `write`."""

    def __init__(self, count):
        self.rows, self._count = [], count

    def write(self, step, values):
        self.rows.append((step, values))
        if len(self.rows) == self._count:
            self.actor.stop()


def test_run_writes_logs_only_for_steps_that_have_logs():
    logger = StoppingLogger(2)
    logger.actor = sync_actor(RecordingBuffer(), logger=logger)
    logger.actor.run()
    ended = {"episode_return": 3.0, "episode_length": 3.0, "episodes": 2}
    assert logger.rows == [(6, ended), (12, ended)]
    logger.actor.close()


def test_run_ends_after_stop():
    buffer = RecordingBuffer()
    actor = sync_actor(buffer)
    buffer_add = buffer.add

    def add(env_ids, step):
        buffer_add(env_ids, step)
        if len(buffer.steps) == 5:
            actor.stop()

    buffer.add = add
    actor.run()
    assert len(buffer.steps) == 5
    actor.close()


def test_actor_with_saved_environment_state_resumes_exactly():
    whole, first = RecordingBuffer(), RecordingBuffer()
    builder = lambda seed: SyncEnv("gymnasium:CartPole-v1", 2, "loop", seed=seed)  # noqa: E731
    make = lambda buffer: Actor(builder, cartpole_inferencer(), buffer, rank=0, seed=5)  # noqa: E731
    actor = make(whole)
    for _ in range(40):
        actor.step()
    actor.close()
    actor = make(first)
    for _ in range(25):
        actor.step()
    state = actor.get_state()
    actor.close()
    rest = RecordingBuffer()
    actor = make(rest)
    actor.set_state(state)
    for _ in range(15):
        actor.step()
    for (_, step), (_, twin) in zip(rest.steps, whole.steps[25:], strict=True):
        np.testing.assert_array_equal(step.timestep.observation, twin.timestep.observation)
        np.testing.assert_array_equal(step.next_timestep.observation, twin.next_timestep.observation)
    actor.close()


def cartpole_inferencer():
    """Return an inferencer that always returns action 0, so that results depend only on the environments."""
    from dm_env import specs

    from tests.fakes import CountingAgent, CountingConfig

    agent = CountingAgent(
        CountingConfig(), specs.Array((4,), np.float32, "observation"), specs.DiscreteArray(2, np.int32, "action")
    )
    return Inferencer(InferencerConfig(), agent, FixedParams({"w": np.float32(0.5)}))
