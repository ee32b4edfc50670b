"""How long a lane gives its environments."""

from __future__ import annotations

import contextlib

import pytest

from rlframe import AsyncEnv, SyncEnv
from rlframe.actors.lanes import stepping
from rlframe.interprocess.progress import Progress
from tests.fakes import CountingEnv


def test_a_pool_has_its_answer_time_and_an_asynchronous_one_that_of_all_it_waits_for():
    with contextlib.closing(SyncEnv(CountingEnv, 4, "loop", answer_timeout=100.0)) as pool:
        assert stepping(pool).allowed == pytest.approx(100.0, abs=10.0)
    with contextlib.closing(AsyncEnv(CountingEnv, 4, 2, "thread", answer_timeout=100.0)) as pool:
        assert stepping(pool).allowed == pytest.approx(200.0, abs=10.0)
    assert stepping(object()).allowed == pytest.approx(600.0, abs=10.0)  # a user's own


def test_each_environment_of_a_loop_has_that_time():
    progress, looks = Progress(), []

    class Watching(CountingEnv):
        def step(self, action):
            looks.append(progress.look(100.0 * len(looks)))
            return super().step(action)

    with contextlib.closing(SyncEnv(Watching, 3, "loop")) as pool:
        pool.reset()
        with stepping(pool):
            pool.step([0, 0, 0])
    assert [stay.seconds for stay in looks] == [0.0, 0.0, 0.0]
