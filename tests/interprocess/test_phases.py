"""Test the measured time of phases, and the progress that restarts this time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import pytest

from rlframe.interprocess.heartbeat import STARTING, Phase, PhaseStatus, ThreadProgress, advance, waiting_for

Look = Callable[[float], "PhaseStatus | None"]

STEPPING = Phase("stepping", 600.0)


@pytest.fixture
def look() -> Look:
    """Return `ThreadProgress.look` for this thread only, because threads of earlier tests may still be in a phase."""
    found = functools.partial(ThreadProgress().look, ident=threading.get_ident())
    assert found(0.0) is None
    return found


def test_phase_time_counts_from_entry_to_exit(look: Look):
    with STEPPING:
        assert look(10.0)[:2] == (STEPPING, 0.0)  # type: ignore[index]
        assert look(15.0)[:2] == (STEPPING, 5.0)  # type: ignore[index]
    assert look(16.0) is None
    with STEPPING:
        assert look(17.0)[1] == 0.0  # type: ignore[index]


def test_entering_the_same_phase_again_counts_as_progress(look: Look):
    for now in (10.0, 20.0, 30.0):
        with STEPPING:
            assert look(now)[1] == 0.0  # type: ignore[index]


def test_advance_restarts_the_phase_time(look: Look):
    with STEPPING:
        look(10.0)
        advance()
        assert look(500.0)[1] == 0.0  # type: ignore[index]
        assert look(501.0)[1] == 1.0  # type: ignore[index]


def test_changed_progress_value_restarts_the_phase_time(look: Look):
    at = [0]
    with Phase("stepping", 600.0, lambda: at[0]):
        look(10.0)
        assert look(500.0)[1] == 490.0  # type: ignore[index]
        at[0] = 1
        assert look(501.0)[1] == 0.0  # type: ignore[index]


def test_time_of_waiting_for_another_process_does_not_count_in_the_enclosing_phase(look: Look):
    with STARTING:
        look(0.0)
        with waiting_for("the learner"):
            for now in (1.0, 10_000.0):
                stay = look(now)
                assert stay is not None and stay.phase.name == "waiting for the learner" and stay.overdue < 0
        assert look(10_001.0)[:2] == (STARTING, 0.0)  # type: ignore[index]


def test_look_returns_the_most_overdue_thread_with_its_traceback():
    progress = ThreadProgress()
    entered, leave = threading.Event(), threading.Event()

    def hang() -> None:
        with Phase("saving", 10.0):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=hang)
    thread.start()
    entered.wait()
    try:
        with STEPPING:
            progress.look(0.0)
            stay = progress.look(20.0)
        assert stay is not None
        assert (stay.phase.name, stay.seconds, stay.overdue) == ("saving", 20.0, 10.0)
        assert "in hang" in stay.where() and "leave.wait()" in stay.where()
    finally:
        leave.set()
        thread.join()


def test_exception_ends_a_phase(look: Look):
    with pytest.raises(ValueError), STEPPING:
        raise ValueError
    assert look(1.0) is None
