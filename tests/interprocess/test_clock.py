"""The coordinator's clock."""

from __future__ import annotations

import pytest

from rlframe.coordinator import coordinator
from rlframe.interprocess.clock import Clock


def test_a_coordinator_that_was_stopped_holds_its_workers_to_nothing_meanwhile(monkeypatch):
    now = 100.0
    monkeypatch.setattr(coordinator.time, "monotonic", lambda: now)
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
