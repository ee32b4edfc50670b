"""Heartbeats: a thread reports at regular intervals that its process is alive, and what the process does (its phase).

The thread writes to a page of shared memory, which the parent process created and reads. The heartbeats stop if the
process is stopped, or if a call into C blocks its interpreter. If the process only makes no progress, the heartbeats
continue, and report how long the process has been in its phase.

A phase is the kind of work that a thread does now. It has a time limit, which distinguishes a hang from slow work:

    with heartbeat.COMPUTING:
        ...

A wait for another process has no time limit. So the process that hangs is reported, and the processes that wait for it
are not reported.
"""

from __future__ import annotations

import collections
import math
import os
import struct
import sys
import threading
import time
import traceback
import weakref
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


VARIABLE = "RLFRAME_HEARTBEAT"  # its value is "DESCRIPTOR:SECONDS": the page's descriptor and the heartbeat interval
TIMEOUT = 30.0  # seconds without a heartbeat after which a process is considered hung
# While a process starts, the timeout is longer by this factor, because imports can block the interpreter for seconds.
_STARTING_FACTOR = 4.0
# The heartbeat interval is a fraction of the timeout, but not above a maximum in seconds.
_INTERVAL_FRACTION, _MAX_INTERVAL = 0.1, 1.0
_watched = threading.Event()  # set if the parent process watches this process
# The page's fields: the number of the heartbeat; then, for the phase that is nearest to its limit, its seconds without
# progress, its limit in seconds, and its name.
_PAGE = struct.Struct("=qdd64s")


class SuspendAwareClock:
    """A clock that stops while this process is suspended. A call returns the time in seconds since the epoch.

    With a normal clock, every watched process would look hung after this process or its machine was suspended.

    Args:
        max_gap: seconds between two calls of `tick`. If more seconds pass, this process was suspended, and the clock
            advances by `max_gap` only.
    """

    def __init__(self, max_gap: float = 2.0) -> None:
        self._max_gap = max_gap
        self._last_tick = time.monotonic()
        self._offset = time.time() - self._last_tick

    def __call__(self) -> float:
        return self._offset + time.monotonic()

    def tick(self) -> float:
        """Record that this process is running. Return the time."""
        now = time.monotonic()
        self._offset -= max(now - self._last_tick - self._max_gap, 0.0)
        self._last_tick = now
        return self._offset + now


def heartbeat_interval(timeout: float) -> float:
    """Return the seconds between two heartbeats. The watcher checks the heartbeats at the same interval."""
    return min(timeout * _INTERVAL_FRACTION, _MAX_INTERVAL)


class HeartbeatMonitor:
    """Checks the heartbeats of a watched process. Start the watched process with `descriptor` and `variables`.

    Args:
        timeout: seconds without a heartbeat after which the process is considered hung.
        now: the current time, from the same clock as the argument of `problem`.

    Attributes:
        timeout: the argument `timeout`.
        phase: name of the process's phase at the last check; empty if no thread was in a phase.
        silent: seconds from the last heartbeat to the last check.
        stuck: seconds without progress in `phase` at the last check.
    """

    def __init__(self, timeout: float, now: float) -> None:
        self.timeout, self._last_beat_at, self._beat = timeout, now, 0
        self.phase, self.silent, self.stuck = STARTING.name, 0.0, 0.0
        self.descriptor = os.memfd_create("rlframe heartbeat")
        weakref.finalize(self, os.close, self.descriptor)
        os.pwrite(self.descriptor, _PAGE.pack(0, 0.0, STARTING.allowed, STARTING.name.encode()), 0)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for the watched process, which contain the page's descriptor and the interval."""
        return {VARIABLE: f"{self.descriptor}:{heartbeat_interval(self.timeout)}"}

    @property
    def page(self) -> bytes:
        """The page's content. Set it for a process on another machine, to the content that was read on that machine."""
        return os.pread(self.descriptor, _PAGE.size, 0)

    @page.setter
    def page(self, written: bytes) -> None:
        os.pwrite(self.descriptor, written, 0)

    def restart(self, now: float) -> None:
        """Count the time without a heartbeat from now on."""
        self._last_beat_at = now

    def problem(self, now: float) -> str:
        """Return the reason why the process is considered hung; an empty string if it is not considered hung.

        Args:
            now: the time of a `SuspendAwareClock`, because a suspended watcher misses heartbeats.
        """
        beat, seconds, allowed, raw = _PAGE.unpack(self.page)
        name = raw.rstrip(b"\0").decode(errors="replace")
        if beat != self._beat:
            self._beat, self._last_beat_at = beat, now
        self.phase, self.silent = name, now - self._last_beat_at
        self.stuck = seconds + self.silent
        if self.silent > self.timeout * (_STARTING_FACTOR if name == STARTING.name else 1.0):
            return f"no heartbeat for {self.silent:.0f} s"
        return describe_stall(name, seconds, allowed) if seconds > allowed else ""


def peer_timeout(seconds: float, watched: float = math.inf) -> float:
    """Return the timeout for other processes: `seconds`, or `watched` if a supervisor kills processes that hang."""
    return watched if _watched.is_set() else seconds


def begin() -> None:
    """Start this process's heartbeats if its parent watches it."""
    found = os.environ.pop(VARIABLE, "")  # child processes must not inherit the variable
    if found:
        descriptor, _, interval = found.partition(":")
        os.set_inheritable(int(descriptor), False)
        sender = HeartbeatSender(int(descriptor), float(interval))
        _watched.set()
        threading.Thread(target=sender.run, name="rlframe heartbeat", daemon=True).start()


class HeartbeatSender:
    """Writes heartbeats in the watched process.

    Args:
        descriptor: the page's descriptor.
        interval: seconds between two heartbeats.
    """

    def __init__(self, descriptor: int, interval: float) -> None:
        self._descriptor, self._interval = descriptor, interval
        self._clock = SuspendAwareClock(2.0 * interval)  # a suspension does not use up a phase's time limit
        self._progress = ThreadProgress()
        self._beats = 0
        self._has_reported = False

    def run(self) -> None:
        """Write heartbeats forever. A call into C that blocks the interpreter also stops the heartbeats."""
        while True:
            self.beat(self._clock.tick())
            time.sleep(self._interval)

    def beat(self, now: float) -> None:
        """Write one heartbeat.

        If a phase exceeds its limit, print the traceback of its thread. This happens only once, because the watcher
        then kills the process.
        """
        self._beats += 1
        status = self._progress.look(now)
        if status is None:
            os.pwrite(self._descriptor, _PAGE.pack(self._beats, 0.0, 0.0, b""), 0)
            return
        name, seconds, allowed = status.phase.name, status.seconds, status.phase.allowed
        os.pwrite(self._descriptor, _PAGE.pack(self._beats, seconds, allowed, name.encode()), 0)
        if seconds > allowed and not self._has_reported:
            self._has_reported = True
            print(f"This process hangs: {describe_stall(name, seconds, allowed)}.", file=sys.stderr)
            print(f"Traceback (most recent call last):\n{status.where()}", end="", file=sys.stderr, flush=True)
