"""If a worker steps several environments, `answer_timeout` applies to each environment separately."""

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

SECONDS = 100.0  # seconds that the fake clock adds at a poll of the pool


class Gated(ScriptedEnv):
    """An environment whose step writes a byte to a pipe, and then waits until it can read a byte from another pipe."""

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
    """A fake clock for the pool. It adds `SECONDS` at each poll in which an environment starts a step or hangs."""

    def __init__(self, folder: pathlib.Path):
        self._began, self._go = (os.open(folder / name, os.O_RDWR) for name in ("began", "go"))
        self._now, self._begin, self._end, self._hangs = 0.0, 0, 0, False
        self.seen: list[Any] = []  # values of `pool.progress()`, one after the start of each step

    def let_through(self, pool: SyncEnv, begin: int, end: int) -> None:
        """Let the environments step: at each poll, end one step and wait for the start of the next step.

        Args:
            pool: the pool.
            begin: number of steps that start.
            end: number of steps that end. If `end` is smaller than `begin`, an environment hangs.
        """
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
        """Let all steps end."""
        os.write(self._go, b"g" * 100)
        os.close(self._began)
        os.close(self._go)


@pytest.fixture
def gate(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Replace the clock of all pools in a test with a `Gate`."""
    for name in ("began", "go"):
        os.mkfifo(tmp_path / name)
    gate = Gate(tmp_path)
    monkeypatch.setattr(group, "SuspendAwareClock", lambda: gate)
    for module in (thread, process):
        monkeypatch.setattr(module, "POLL_INTERVAL", 0.01)
    yield gate
    gate.close()


@pytest.mark.parametrize("type", ["thread", "process"])
def test_answer_timeout_applies_to_each_environment_of_a_worker(type, gate, tmp_path):
    builder = functools.partial(Gated, tmp_path)
    with SyncEnv(builder, 4, type, num_workers=1, answer_timeout=1.5 * SECONDS) as pool:
        pool.reset()
        gate.let_through(pool, begin=4, end=4)
        assert pool.step(np.zeros(4, np.int32)).reward.tolist() == [1.0] * 4
        assert gate.seen == [[0], [1], [2], [3]]  # the progress changes with each environment


@pytest.mark.parametrize("type", ["thread", "process"])
def test_error_names_the_environment_that_hangs(type, gate, tmp_path):
    builder = functools.partial(Gated, tmp_path)
    with SyncEnv(builder, 4, type, num_workers=1, answer_timeout=1.5 * SECONDS) as pool:
        pool.reset()
        gate.let_through(pool, begin=2, end=1)
        with pytest.raises(EnvError, match=r"No answer from environment 1 within 150 s: it hangs\."):
            pool.step(np.zeros(4, np.int32))
