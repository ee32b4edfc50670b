"""Phases: the kind of work that each thread of this process does now, and for how long.

A phase has a time limit, which distinguishes a hang from slow work:

    with phases.COMPUTING:
        ...

A wait for another process has no time limit. So the process that hangs is reported, and the processes that wait for it
are not reported.
"""

from __future__ import annotations

import collections
import math
import sys
import traceback
from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple


class Phase:
    """The kind of work that a thread does. Phases can be nested. Then only the time of the innermost phase counts.

    Args:
        name: name of the phase in messages, such as "stepping".
        allowed: the phase's limit: maximum seconds without progress.
        progress: a function whose return value changes when the work makes progress. Another thread calls this
            function. If None, only calls of `advance` report progress.
    """

    __slots__ = ("allowed", "name", "progress")

    def __init__(self, name: str, allowed: float, progress: Callable[[], Any] | None = None) -> None:
        self.name, self.allowed, self.progress = name, allowed, progress

    # These two methods must be fast, because they run at every step of an environment.

    def __enter__(self) -> None:
        thread = _threads[get_ident()]
        thread.within = (self, thread.within)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        thread = _threads[get_ident()]
        thread.within = thread.within[1]  # type: ignore[index]


STARTING = Phase("starting", 600.0)  # during imports, and in the constructor of a node's object
COMPILING = Phase("compiling", 1800.0)
COMPUTING = Phase("computing", 1800.0)  # may include a compilation for new shapes
SAVING = Phase("saving", 1800.0)
ENDING = Phase("ending", 60.0)


def waiting_for(name: str) -> Phase:
    """Return the phase of a wait for another process. This phase has no time limit."""
    return Phase(f"waiting for {name}", math.inf)


def advance() -> None:
    """Report progress in this thread's current phase."""
    _threads[get_ident()].advances += 1


class _ThreadState:
    __slots__ = ("advances", "within")

    def __init__(self) -> None:
        self.within: tuple[Phase, Any] | None = None  # (innermost phase, `within` of the enclosing phase)
        self.advances = 0


# Thread identifier -> state. A new thread may get the identifier of an ended thread. Its state can be reused, because
# the ended thread had left all its phases.
_threads: collections.defaultdict[int, _ThreadState] = collections.defaultdict(_ThreadState)


class PhaseStatus(NamedTuple):
    """The current phase of a thread, and its time without progress."""

    phase: Phase
    seconds: float  # seconds without progress
    ident: int  # the thread's identifier

    @property
    def overdue(self) -> float:
        """Seconds by which the phase exceeds its limit. Negative before the limit is reached."""
        return self.seconds - self.phase.allowed

    def where(self) -> str:
        """Return the thread's current traceback as text."""
        frame = sys._current_frames().get(self.ident)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""


class ThreadProgress:
    """Measures the time since each thread last made progress. Each call of `look` compares with the call before."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, Any, float]] = {}  # thread id -> (phase, progress, time of last change)

    def look(self, now: float, ident: int | None = None) -> PhaseStatus | None:
        """Return the status of the thread that is nearest to its limit or beyond it. None if no thread is in a phase.

        Args:
            now: current time in seconds. All calls must use the same clock.
            ident: identifier of a thread, to check only this thread. None checks all threads.
        """
        found = []
        for thread_id, thread in list(_threads.items()):
            within = thread.within  # read only once, because the running thread can change it
            ask = within[0].progress if within is not None else None
            at = thread.advances, ask() if ask is not None else None
            before, then, since = self._seen.get(thread_id, (None, None, now))
            if within is not before or at != then:
                since = now
            self._seen[thread_id] = within, at, since
            if within is not None and ident in (None, thread_id):
                found.append(PhaseStatus(within[0], now - since, thread_id))
        return max(found, key=lambda status: status.overdue, default=None)


def describe_stall(name: str, seconds: float, allowed: float) -> str:
    """Return a description of a phase that exceeds its limit."""
    return f"in phase {name} for {seconds:.0f} s, allowed {allowed:g} s"
