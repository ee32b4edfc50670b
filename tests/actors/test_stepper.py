"""The time that a pool has to answer."""

from __future__ import annotations

import numpy as np
import pytest

from rlframe import AsyncEnv, SyncEnv
from rlframe.actors.stepper import stepping
from rlframe.interprocess.progress import ThreadProgress
from tests.fakes import CountingEnv

POOLS = {
    "loop": lambda env: SyncEnv(env, 3, "loop", answer_timeout=100.0),
    "thread": lambda env: SyncEnv(env, 3, "thread", num_workers=1, answer_timeout=100.0),
    "async thread": lambda env: AsyncEnv(env, 3, 3, "thread", num_workers=1, answer_timeout=100.0),
}


@pytest.mark.parametrize("kind", POOLS)
def test_a_pool_has_its_answer_time(kind):
    with POOLS[kind](CountingEnv) as pool:
        assert stepping(pool).allowed == pytest.approx(100.0, abs=10.0)
    assert stepping(object()).allowed == pytest.approx(600.0, abs=10.0)  # a user's own


def test_envpool_steps_its_environments_together():
    with AsyncEnv("CartPole-v1", 4, 4, "envpool", answer_timeout=100.0) as pool:
        assert stepping(pool).allowed == pytest.approx(100.0, abs=10.0)


@pytest.mark.parametrize("kind", ["loop", "thread", "async thread"])
def test_each_environment_has_that_time(kind):
    progress, looks = ThreadProgress(), []

    class Watching(CountingEnv):
        def step(self, action):
            looks.append(progress.look(100.0 * len(looks)))
            return super().step(action)

    with POOLS[kind](Watching) as pool:
        pool.reset() if pool.is_sync else pool.recv()
        with stepping(pool):
            if pool.is_sync:
                pool.step(np.zeros(3, np.int32))
            else:
                pool.send(np.arange(3), np.zeros(3, np.int32))
                pool.recv()
    assert [stay.seconds for stay in looks] == [0.0, 0.0, 0.0]


def test_so_has_each_that_another_process_steps_out_of_turn():
    with AsyncEnv(CountingEnv, 3, 3, "process", num_workers=1) as pool:
        pool.recv()
        assert pool.progress() == [3]
        pool.send(np.arange(3), np.zeros(3, np.int32))
        pool.recv()
        assert pool.progress() == [6]
