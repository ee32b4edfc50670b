"""The coordinator's clock."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from rlframe.interprocess import clock as clock_module
from rlframe.interprocess.clock import Clock


def test_a_coordinator_that_was_stopped_holds_its_workers_to_nothing_meanwhile(monkeypatch):
    now = 100.0
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    clock = Clock()
    began = clock()
    for _ in range(10):
        now += 0.5
        clock.tick()
    assert clock() - began == pytest.approx(5.0)
    now += 600.0  # SIGSTOP, and SIGCONT ten minutes later
    clock.tick()
    assert clock() - began == pytest.approx(7.0)
    now += 0.5
    clock.tick()
    assert clock() - began == pytest.approx(7.5)
