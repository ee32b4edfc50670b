"""How long one environment of a pool may take, when a worker steps several one after another."""

from __future__ import annotations

import functools
import os
import pathlib
from typing import Any

import numpy as np
import pytest

from rlframe.envs import SyncEnv, group, process, thread
from rlframe.errors import EnvError
from tests.envs.scripted import ScriptedEnv

SECONDS = 100.0  # by the pool's clock, from look to look


class Gated(ScriptedEnv):
    """Each step says that it has begun, then waits until it is let through. By named pipes: any process may."""

    def __init__(self, folder: pathlib.Path):
        self.began, self.go = (os.open(folder / name, os.O_RDWR) for name in ("began", "go"))

    def step(self, action):
        os.write(self.began, b"b")
        os.read(self.go, 1)
        return super().step(action)

    def close(self):
        os.close(self.began)
        os.close(self.go)


class Gate:
    """The pool's clock: `SECONDS` pass at each look at which an environment has begun its step, or one hangs."""

    def __init__(self, folder: pathlib.Path):
        self._began, self._go = (os.open(folder / name, os.O_RDWR) for name in ("began", "go"))
        self._now, self._begin, self._end, self._hangs = 0.0, 0, 0, False
        self.seen: list[Any] = []  # what the pool says of its progress, each time that a step has begun

    def let_through(self, pool: SyncEnv, begin: int, end: int) -> None:
        """From look to look one step ends and the next begins, until so many have begun and so many have ended."""
        self._pool, self._begin, self._end, self._hangs = pool, begin, end, begin > end
        self._is_first = True

    def tick(self) -> float:
        if self._end and not self._is_first:
            self._end -= 1
            os.write(self._go, b"g")
        self._is_first = False
        if self._begin:
            self._begin -= 1
            os.read(self._began, 1)
            self.seen.append(self._pool.progress())
            self._now += SECONDS
        elif self._hangs:
            self._now += SECONDS
        return self._now

    def close(self) -> None:
        """Lets all through."""
        os.write(self._go, b"g" * 100)
        os.close(self._began)
        os.close(self._go)


@pytest.fixture
def gate(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """The clock of the pools that are made in the test."""
    for name in ("began", "go"):
        os.mkfifo(tmp_path / name)
    gate = Gate(tmp_path)
    monkeypatch.setattr(group, "SuspendAwareClock", lambda: gate)
    for module in (thread, process):
        monkeypatch.setattr(module, "POLL_INTERVAL", 0.01)
    yield gate
    gate.close()


@pytest.mark.parametrize("type", ["thread", "process"])
def test_it_is_the_time_of_a_step_however_many_environments_a_worker_has(type, gate, tmp_path):
    builder = functools.partial(Gated, tmp_path)
    with SyncEnv(builder, 4, type, num_workers=1, answer_timeout=1.5 * SECONDS) as pool:
        pool.reset()
        gate.let_through(pool, begin=4, end=4)
        assert pool.step(np.zeros(4, np.int32)).reward.tolist() == [1.0] * 4
        assert gate.seen == [[0], [1], [2], [3]]  # as who waits in an Actor sees it


@pytest.mark.parametrize("type", ["thread", "process"])
def test_the_very_environment_that_hangs_is_named(type, gate, tmp_path):
    builder = functools.partial(Gated, tmp_path)
    with SyncEnv(builder, 4, type, num_workers=1, answer_timeout=1.5 * SECONDS) as pool:
        pool.reset()
        gate.let_through(pool, begin=2, end=1)
        with pytest.raises(EnvError, match=r"No answer from environment 1 within 150 s: it hangs\."):
            pool.step(np.zeros(4, np.int32))
