"""The current phase of each thread in this process, and how long it has lasted.

Phases distinguish a hang from slow work.

Declare the phase of work that should finish within a time:

    with phases.COMPUTING:
        ...

A wait for another process has no time limit. Only the process that hangs is reported, never a process that waits for
it.
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
    """A phase of the thread that enters it. Phases nest: only the time of the innermost phase counts.

    Args:
        name: for messages, such as "stepping".
        allowed: seconds without progress.
        progress: returns a value that changes when work progresses. Other threads call it. None: only `advance` reports
            progress.
    """

    __slots__ = ("allowed", "name", "progress")

    def __init__(self, name: str, allowed: float, progress: Callable[[], Any] | None = None) -> None:
        self.name, self.allowed, self.progress = name, allowed, progress

    # Entered at every step of an environment, so a tenth of a microsecond matters.

    def __enter__(self) -> None:
        thread = _threads[get_ident()]
        thread.within = (self, thread.within)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        thread = _threads[get_ident()]
        thread.within = thread.within[1]  # type: ignore[index]


STARTING = Phase("starting", 600.0)  # imports, and the constructor of a node's object
COMPILING = Phase("compiling", 1800.0)
COMPUTING = Phase("computing", 1800.0)  # includes compilation, for new shapes
SAVING = Phase("saving", 1800.0)
ENDING = Phase("ending", 60.0)


def waiting_for(name: str) -> Phase:
    """Return the phase of a wait for another process. It has no time limit."""
    return Phase(f"waiting for {name}", math.inf)


def advance() -> None:
    """Report progress in this thread's current phase."""
    _threads[get_ident()].advances += 1


class _ThreadState:
    __slots__ = ("advances", "within")

    def __init__(self) -> None:
        self.within: tuple[Phase, Any] | None = None  # (the innermost phase, the enclosing phase's entry)
        self.advances = 0


# By thread identifier. The system may reuse the identifier of a thread that has ended; that thread had left its phases.
_threads: collections.defaultdict[int, _ThreadState] = collections.defaultdict(_ThreadState)


class PhaseStatus(NamedTuple):
    """A thread's current phase."""

    phase: Phase
    seconds: float  # without progress
    ident: int  # the thread's identifier

    @property
    def overdue(self) -> float:
        """Seconds beyond the limit of the phase; negative within the limit."""
        return self.seconds - self.phase.allowed

    def where(self) -> str:
        """Return the thread's traceback as text."""
        frame = sys._current_frames().get(self.ident)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""


class ThreadProgress:
    """Measures the seconds without progress of each thread, from one call of `look` to the next."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, Any, float]] = {}  # by thread id: (phase, progress, time of the last change)

    def look(self, now: float, ident: int | None = None) -> PhaseStatus | None:
        """Return the status that is nearest to its deadline, or furthest beyond it; None if no thread is in a phase.

        Args:
            now: in seconds, by any clock.
            ident: the identifier of the only thread to consider; None: all threads.
        """
        found = []
        for thread_id, thread in list(_threads.items()):
            within = thread.within  # read once, because the thread continues to run
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
    """Return a text about a phase that exceeds its limit."""
    return f"in phase {name} for {seconds:.0f} s, allowed {allowed:g} s"
