"""Returns, lengths and counts of episodes, and the time limit of a pool."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from rlframe import Actor, AsyncEnv, Inferencer, InferencerConfig, SyncEnv
from rlframe.actors.stepper import EpisodeStatistics, stepping_phase
from rlframe.interprocess.heartbeat import ThreadProgress
from rlframe.types import FIRST, LAST, MID, TimeStep
from tests.fakes import CountingEnv, FixedParams, RecordingBuffer, counting_agent

POOLS = {
    "loop": lambda env: SyncEnv(env, 3, "loop", answer_timeout=100.0),
    "thread": lambda env: SyncEnv(env, 3, "thread", num_workers=1, answer_timeout=100.0),
    "async thread": lambda env: AsyncEnv(env, 3, 3, "thread", num_workers=1, answer_timeout=100.0),
}


@pytest.mark.parametrize("kind", POOLS)
def test_stepping_phase_has_the_answer_timeout_of_the_pool(kind):
    with POOLS[kind](CountingEnv) as pool:
        assert stepping_phase(pool).allowed == pytest.approx(100.0, abs=10.0)
    assert stepping_phase(object()).allowed == pytest.approx(600.0, abs=10.0)  # the default, for a user-defined pool


def test_envpool_has_one_answer_timeout_for_all_environments():
    with AsyncEnv("CartPole-v1", 4, 4, "envpool", answer_timeout=100.0) as pool:
        assert stepping_phase(pool).allowed == pytest.approx(100.0, abs=10.0)


@pytest.mark.parametrize("kind", ["loop", "thread", "async thread"])
def test_each_environment_gets_the_full_answer_timeout(kind):
    progress, looks = ThreadProgress(), []

    class Watching(CountingEnv):
        def step(self, action):
            looks.append(progress.look(100.0 * len(looks)))
            return super().step(action)

    with POOLS[kind](Watching) as pool:
        pool.reset() if pool.is_sync else pool.recv()
        with stepping_phase(pool):
            if pool.is_sync:
                pool.step(np.zeros(3, np.int32))
            else:
                pool.send(np.arange(3), np.zeros(3, np.int32))
                pool.recv()
    assert [stay.seconds for stay in looks] == [0.0, 0.0, 0.0]


def test_worker_process_reports_progress_for_each_environment():
    with AsyncEnv(CountingEnv, 3, 3, "process", num_workers=1) as pool:
        pool.recv()
        assert pool.progress() == [3]
        pool.send(np.arange(3), np.zeros(3, np.int32))
        pool.recv()
        assert pool.progress() == [6]


def timestep(step_types, rewards) -> TimeStep:
    rewards = np.asarray(rewards, np.float32)
    return TimeStep(np.asarray(step_types, np.uint8), rewards, np.ones_like(rewards), rewards)


def test_returns_and_lengths_of_ended_episodes_are_averaged():
    statistics = EpisodeStatistics(2)
    assert statistics.update(timestep([MID, MID], [1.0, 2.0])) is None
    logs = statistics.update(timestep([LAST, LAST], [1.0, 4.0]))
    assert logs == {"episode_return": 4.0, "episode_length": 2.0, "episodes": 2}


def test_step_after_last_is_not_counted():
    statistics = EpisodeStatistics(1)
    for step_type, reward in [(LAST, 5.0), (FIRST, 0.0), (MID, 1.0), (LAST, 1.0)]:
        logs = statistics.update(timestep([step_type], [reward]))
    assert logs == {"episode_return": 2.0, "episode_length": 2.0, "episodes": 1}
    assert statistics.env_steps == 3 and statistics.episodes == 2


def test_first_without_a_preceding_last_resets_the_sum():
    statistics = EpisodeStatistics(1)
    statistics.update(timestep([MID], [100.0]))
    statistics.update(timestep([FIRST], [0.0]))
    assert statistics.update(timestep([LAST], [1.0]))["episode_return"] == 1.0


def test_only_the_given_environments_are_counted():
    statistics = EpisodeStatistics(3)
    statistics.update(timestep([MID, MID], [1.0, 10.0]), np.array([2, 0]))
    logs = statistics.update(timestep([LAST], [1.0]), np.array([2]))
    assert logs == {"episode_return": 2.0, "episode_length": 2.0, "episodes": 1}


def test_restored_statistics_drop_open_episodes_if_environments_reset():
    statistics = EpisodeStatistics(1)
    statistics.update(timestep([MID], [3.0]))
    resumed, reset = EpisodeStatistics(1), EpisodeStatistics(1)
    resumed.set_state(statistics.get_state(), resets=False)
    reset.set_state(statistics.get_state(), resets=True)
    assert resumed.update(timestep([LAST], [1.0]))["episode_return"] == 4.0
    assert reset.update(timestep([LAST], [1.0]))["episode_return"] == 1.0
    assert reset.env_steps == 2


@pytest.mark.parametrize("pool", [SyncEnv, functools.partial(AsyncEnv, wait_num=1)])
def test_returns_use_unclipped_rewards_if_the_agent_learns_from_clipped_rewards(pool):
    inferencer = Inferencer(InferencerConfig(), counting_agent(), FixedParams({"w": np.float32(0.5)}))
    buffer = RecordingBuffer()
    actor = Actor(pool(CountingEnv, size=2, clip_rewards=0.25), inferencer, buffer)
    logs = [each for each in (actor.step() for _ in range(12)) if each]
    actor.close()
    assert logs and {each["episode_return"] for each in logs} == {3.0}
    rewards = {float(reward) for _, step in buffer.steps for reward in step.next_timestep.reward}
    assert rewards == {0.0, 0.25}
