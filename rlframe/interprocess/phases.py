"""The phases that threads of this process are in, and for how long. They tell work that hangs from slow work.

Work that should be done within a time is declared where it is done:

    with phases.COMPUTING:
        ...

A wait for another process has no limit: the process that hangs is judged, never the one that waits for it.
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
    """Work of the thread that enters it. Phases nest: while an inner one goes on, those around it are not counted.

    Args:
        name: what it is, for messages: "stepping".
        allowed: seconds that it may make no progress.
        progress: gives what changes as it gets on, to whichever thread asks; None: only `advance` tells.
    """

    __slots__ = ("allowed", "name", "progress")

    def __init__(self, name: str, allowed: float, progress: Callable[[], Any] | None = None) -> None:
        self.name, self.allowed, self.progress = name, allowed, progress

    # Where environments are stepped: every tenth of a microsecond counts.

    def __enter__(self) -> None:
        thread = _threads[get_ident()]
        thread.within = (self, thread.within)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        thread = _threads[get_ident()]
        thread.within = thread.within[1]  # type: ignore[index]


STARTING = Phase("starting", 600.0)  # imports, and the constructor of what the process serves
COMPILING = Phase("compiling", 1800.0)
COMPUTING = Phase("computing", 1800.0)  # a call whose shapes are new compiles
SAVING = Phase("saving", 1800.0)
ENDING = Phase("ending", 60.0)


def waiting_for(name: str) -> Phase:
    """Return the phase of a wait for another process, which has no limit."""
    return Phase(f"waiting for {name}", math.inf)


def advance() -> None:
    """Note that the phase which this thread is in gets on."""
    _threads[get_ident()].advances += 1


class _ThreadState:
    """The state of one thread."""

    __slots__ = ("advances", "within")

    def __init__(self) -> None:
        self.within: tuple[Phase, Any] | None = None  # (the phase, what it is within in turn)
        self.advances = 0


# By their identifiers. A later thread may have that of one that has ended, and was in no phase any more.
_threads: collections.defaultdict[int, _ThreadState] = collections.defaultdict(_ThreadState)


class PhaseStatus(NamedTuple):
    """A thread in a phase."""

    phase: Phase
    seconds: float  # without progress
    ident: int  # of the thread

    @property
    def overdue(self) -> float:
        """Seconds beyond the limit of the phase; negative before it."""
        return self.seconds - self.phase.allowed

    def where(self) -> str:
        """Return the traceback of the thread, as text."""
        frame = sys._current_frames().get(self.ident)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""


class ThreadProgress:
    """Measures how long each thread of this process has been in its phase, from one `look` to the next."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, Any, float]] = {}  # (within, how far it is, since when), by thread

    def look(self, now: float, ident: int | None = None) -> PhaseStatus | None:
        """Return the stay that is nearest to its deadline, or furthest beyond it; None if no thread is in a phase.

        Args:
            now: in seconds, by a clock of the caller's.
            ident: of the one thread that is meant; None: all are.
        """
        found = []
        for thread_id, thread in list(_threads.items()):
            within = thread.within  # once: the thread goes on meanwhile
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
    """Return how a stay that is overdue is told."""
    return f"in phase {name} for {seconds:.0f} s, allowed {allowed:g} s"
