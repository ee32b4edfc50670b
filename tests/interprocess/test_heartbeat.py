"""Test when a monitor considers a watched process hung. The tests use a simulated time."""

from __future__ import annotations

import functools
import os
import threading
import time
from types import SimpleNamespace

import pytest

from rlframe.interprocess import heartbeat
from rlframe.interprocess.heartbeat import (
    COMPILING,
    STARTING,
    VARIABLE,
    HeartbeatMonitor,
    HeartbeatSender,
    Phase,
    SuspendAwareClock,
    ThreadProgress,
    heartbeat_interval,
)


@pytest.fixture(autouse=True)
def look_at_this_thread_only(monkeypatch: pytest.MonkeyPatch):
    """Ignore all threads but this one, because threads of earlier tests may still be in a phase."""
    look = functools.partialmethod(ThreadProgress.look, ident=threading.get_ident())
    monkeypatch.setattr(ThreadProgress, "look", look)


class Watched:
    """A monitor that watches a sender of heartbeats. Their time is simulated, in steps of one second."""

    def __init__(self, timeout: float = 30.0) -> None:
        self.now = 0.0
        self.monitor = HeartbeatMonitor(timeout, self.now)
        self.sender = HeartbeatSender(self.monitor.descriptor, 1.0)

    def advance_time(self, seconds: float, *, beats: bool) -> str:
        """Advance the time by `seconds`, but stop at the first problem. Return the problem; empty if there is none."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            if beats:
                self.sender.beat(self.now)
            if problem := self.monitor.problem(self.now):
                return problem
        return ""


def test_process_without_heartbeats_is_considered_hung():
    watched = Watched()
    assert watched.advance_time(1000.0, beats=True) == ""
    assert watched.advance_time(30.0, beats=False) == ""
    assert watched.advance_time(1.0, beats=False) == "no heartbeat for 31 s"


def test_starting_process_has_a_longer_heartbeat_timeout():
    watched = Watched()
    assert watched.advance_time(120.0, beats=False) == ""
    assert watched.advance_time(1.0, beats=False) == "no heartbeat for 121 s"
    watched = Watched()
    with STARTING:
        assert watched.advance_time(5.0, beats=True) == ""
        assert watched.advance_time(120.0, beats=False) == ""
    watched.advance_time(1.0, beats=True)
    assert watched.advance_time(40.0, beats=False) == "no heartbeat for 31 s"


def test_compilation_is_considered_hung_after_half_an_hour(capsys: pytest.CaptureFixture[str]):
    watched = Watched()
    with COMPILING:
        assert watched.advance_time(180.0, beats=True) == ""
        assert watched.advance_time(1620.0, beats=True) == ""
        assert watched.advance_time(10.0, beats=True) == "in phase compiling for 1801 s, allowed 1800 s"
    printed = capsys.readouterr().err
    assert printed.startswith(
        "This process hangs: in phase compiling for 1801 s, allowed 1800 s.\nTraceback (most recent"
    )
    assert "test_compilation_is_considered_hung_after_half_an_hour" in printed  # the traceback


def test_environment_step_is_considered_hung_after_its_allowed_time():
    watched = Watched()
    with Phase("stepping", 605.0):
        assert watched.advance_time(300.0, beats=True) == ""
    with Phase("stepping", 605.0):
        assert watched.advance_time(605.0, beats=True) == ""
        assert watched.advance_time(10.0, beats=True) == "in phase stepping for 606 s, allowed 605 s"


def test_time_of_a_suspension_is_not_reported_as_a_hang(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    watchers, workers = SuspendAwareClock(2.0), SuspendAwareClock(2.0)
    monitor = HeartbeatMonitor(30.0, watchers())
    sender = HeartbeatSender(monitor.descriptor, 1.0)

    def look(beats: bool) -> str:
        if beats:
            sender.beat(workers.tick())
        return monitor.problem(watchers.tick())

    with Phase("stepping", 605.0):
        for _ in range(10):
            now += 1.0
            assert look(beats=True) == ""
        now += 3600.0  # the machine was suspended, or all processes were stopped
        assert look(beats=False) == ""
        for _ in range(590):
            now += 1.0
            assert look(beats=True) == ""
        for _ in range(20):
            now += 1.0
            problem = look(beats=True)
        assert problem.startswith("in phase stepping for 6")


def test_page_is_closed_when_its_monitor_is_deleted():
    monitor = HeartbeatMonitor(1.0, time.time())
    descriptor = monitor.descriptor
    assert monitor.variables == {VARIABLE: f"{descriptor}:0.1"}
    os.fstat(descriptor)
    del monitor
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_heartbeat_interval_is_a_tenth_of_the_timeout_but_at_most_one_second():
    assert [heartbeat_interval(timeout) for timeout in (0.5, 2.0, 30.0, 600.0)] == [0.05, 0.2, 1.0, 1.0]


def test_clock_does_not_advance_while_its_process_is_stopped(monkeypatch):
    now = 100.0
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    clock = SuspendAwareClock()
    start = clock()
    for _ in range(10):
        now += 0.5
        clock.tick()
    assert clock() - start == pytest.approx(5.0)
    now += 600.0  # the process was stopped (SIGSTOP) for ten minutes
    clock.tick()
    assert clock() - start == pytest.approx(7.0)
    now += 0.5
    clock.tick()
    assert clock() - start == pytest.approx(7.5)
