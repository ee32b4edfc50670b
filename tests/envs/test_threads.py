"""The threads of a pool end with the pool. If an environment hangs, an error contains its id, and `close` is fast."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import time

import numpy as np
import pytest

from rlframe.envs import AsyncEnv, SyncEnv
from rlframe.envs.adapters import env_seed
from rlframe.errors import EnvError
from tests.envs.scripted import ScriptedEnv
from tests.waiting import wait_until


class Hanging(ScriptedEnv):
    """An environment that hangs in its second step until `released` is set, if its index in the pool is `victim`."""

    def __init__(self, hangs, released, closed, victim=2, seed=0):
        self.hangs, self.released, self.closed, self.is_victim = hangs, released, closed, seed == env_seed(0, victim)

    def step(self, action):
        result = super().step(action)
        if self.is_victim and self.t == 2:
            self.hangs.set()
            assert self.released.wait(60.0)
        return result

    def close(self):
        self.closed.append(self.is_victim)


@pytest.fixture
def hanging(monkeypatch):
    """Yield a builder of `Hanging`, the event `hangs`, and a list with one item for each closed environment.

    `hangs` is set when an environment hangs. An item is True if the closed environment is the one that hangs.
    """
    monkeypatch.setattr("rlframe.envs.thread._CLOSE_TIMEOUT", 100.0)
    hangs, released, closed = threading.Event(), threading.Event(), []
    yield functools.partial(Hanging, hangs, released, closed), hangs, closed
    released.set()
    wait_until(lambda: len(closed) == 4)
    assert sorted(closed) == [False, False, False, True]


def step_until_it_hangs(pool):
    if pool.is_sync:
        pool.reset()
        for _ in range(2):
            pool.step(np.zeros(4, np.int32))
    while True:
        env_ids, _ = pool.recv()
        pool.send(env_ids, np.zeros(len(env_ids), np.int32))


POOLS = {
    "sync": functools.partial(SyncEnv, size=4, type="thread", num_workers=2),
    "async": functools.partial(AsyncEnv, size=4, wait_num=2, type="thread", num_workers=2),
}


@pytest.mark.parametrize("kind", POOLS)
def test_error_for_a_hung_environment_in_a_thread_contains_its_id(kind, hanging):
    builder, _, closed = hanging
    with POOLS[kind](builder, answer_timeout=1.0) as pool:
        with pytest.raises(EnvError, match="No answer from environment 2 within 1 s: it hangs"):
            step_until_it_hangs(pool)
        started = time.monotonic()
    assert time.monotonic() - started < 60.0  # `close` has not waited for the hung thread
    assert True not in closed  # a hung environment must not be closed during its step


@pytest.mark.parametrize("kind", POOLS)
def test_ctrl_c_interrupts_a_step_immediately(kind, hanging):
    builder, hangs, closed = hanging
    interrupted = []

    def interrupt(pool):
        wait_until(lambda: hangs.is_set() and pool._pool._is_waiting)  # after `send`
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    wait_for_all = {"wait_num": 4} if kind == "async" else {}  # so that `recv` waits for the hung environment
    with pytest.raises(KeyboardInterrupt), POOLS[kind](builder, **wait_for_all) as pool:
        thread = threading.Thread(target=interrupt, args=(pool,))
        thread.start()
        step_until_it_hangs(pool)
    assert time.monotonic() - interrupted[0] < 60.0  # `close` has not waited for the hung thread
    thread.join()
    assert True not in closed


@pytest.mark.parametrize("kind", POOLS)
def test_garbage_collection_of_a_pool_ends_its_threads_and_closes_its_environments(kind):
    closed = []
    builder = functools.partial(Hanging, threading.Event(), threading.Event(), closed, victim=4)
    before = threading.active_count()
    for _ in range(20):
        pool = POOLS[kind](builder)
        pool.reset() if pool.is_sync else pool.recv()
        del pool
    gc.collect()
    wait_until(lambda: threading.active_count() <= before and len(closed) == 80)


class Exiting(ScriptedEnv):
    def step(self, action):
        raise KeyboardInterrupt("in a thread")


def test_base_exception_in_a_thread_reaches_the_caller():
    with SyncEnv(Exiting, 4, "thread", num_workers=2) as pool:
        pool.reset()
        with pytest.raises(KeyboardInterrupt, match="in a thread"):
            pool.step(np.zeros(4, np.int32))
