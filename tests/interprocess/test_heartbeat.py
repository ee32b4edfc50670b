"""The judgment over a process that beats, by a clock of the test's."""

from __future__ import annotations

import functools
import os
import threading
import time
from types import SimpleNamespace

import pytest

from rlframe.interprocess import heartbeat
from rlframe.interprocess.heartbeat import (
    VARIABLE,
    HeartbeatMonitor,
    HeartbeatSender,
    SuspendAwareClock,
    heartbeat_interval,
)
from rlframe.interprocess.phases import COMPILING, STARTING, Phase, ThreadProgress


@pytest.fixture(autouse=True)
def only_this_thread_is_judged(monkeypatch: pytest.MonkeyPatch):
    """Others, of earlier tests, may be in phases of their own."""
    look = functools.partialmethod(ThreadProgress.look, ident=threading.get_ident())
    monkeypatch.setattr(ThreadProgress, "look", look)


class Watched:
    """A pulse and the heart that it is of, both by a clock that the test moves, a second at a time."""

    def __init__(self, timeout: float = 30.0) -> None:
        self.now = 0.0
        self.monitor = HeartbeatMonitor(timeout, self.now)
        self.sender = HeartbeatSender(self.monitor.descriptor, 1.0)

    def pass_by(self, seconds: float, *, beats: bool) -> str:
        """Passes time until there is a problem, which it returns."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            if beats:
                self.sender.beat(self.now)
            if problem := self.monitor.problem(self.now):
                return problem
        return ""


def test_a_process_that_beats_is_well_and_one_that_falls_silent_hangs():
    watched = Watched()
    assert watched.pass_by(1000.0, beats=True) == ""
    assert watched.pass_by(30.0, beats=False) == ""
    assert watched.pass_by(1.0, beats=False) == "no heartbeat for 31 s"


def test_a_process_that_starts_may_be_silent_for_longer():
    watched = Watched()
    assert watched.pass_by(120.0, beats=False) == ""
    assert watched.pass_by(1.0, beats=False) == "no heartbeat for 121 s"
    watched = Watched()
    with STARTING:
        assert watched.pass_by(5.0, beats=True) == ""
        assert watched.pass_by(120.0, beats=False) == ""
    watched.pass_by(1.0, beats=True)
    assert watched.pass_by(40.0, beats=False) == "no heartbeat for 31 s"


def test_a_compilation_of_three_minutes_is_well_and_one_of_half_an_hour_hangs(capsys: pytest.CaptureFixture[str]):
    watched = Watched()
    with COMPILING:
        assert watched.pass_by(180.0, beats=True) == ""
        assert watched.pass_by(1620.0, beats=True) == ""
        assert watched.pass_by(10.0, beats=True) == "in phase compiling for 1801 s, allowed 1800 s"
    told = capsys.readouterr().err
    assert told.startswith("This process hangs: in phase compiling for 1801 s, allowed 1800 s.\nTraceback (most recent")
    assert "test_a_compilation_of_three_minutes" in told  # where it hangs


def test_an_environment_s_step_of_five_minutes_is_well_and_one_beyond_its_answer_time_hangs():
    watched = Watched()
    with Phase("stepping", 605.0):
        assert watched.pass_by(300.0, beats=True) == ""
    with Phase("stepping", 605.0):
        assert watched.pass_by(605.0, beats=True) == ""
        assert watched.pass_by(10.0, beats=True) == "in phase stepping for 606 s, allowed 605 s"


def test_who_was_asleep_itself_blames_nobody(monkeypatch: pytest.MonkeyPatch):
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
        now += 3600.0  # the machine was suspended, or the whole group stopped
        assert look(beats=False) == ""
        for _ in range(590):
            now += 1.0
            assert look(beats=True) == ""
        for _ in range(20):
            now += 1.0
            problem = look(beats=True)
        assert problem.startswith("in phase stepping for 6")


def test_the_page_is_let_go_of_with_the_pulse():
    monitor = HeartbeatMonitor(1.0, time.time())
    descriptor = monitor.descriptor
    assert monitor.variables == {VARIABLE: f"{descriptor}:0.1"}
    os.fstat(descriptor)
    del monitor
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_beats_are_ten_to_a_timeout_and_a_second_apart_at_most():
    assert [heartbeat_interval(timeout) for timeout in (0.5, 2.0, 30.0, 600.0)] == [0.05, 0.2, 1.0, 1.0]


def test_a_coordinator_that_was_stopped_holds_its_workers_to_nothing_meanwhile(monkeypatch):
    now = 100.0
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    clock = SuspendAwareClock()
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
