"""Heartbeats: a thread of a process reports again and again that the process is alive, and in which phase it is.

It writes to a page of shared memory, which belongs to the process that started and watches it. A process that is
stopped, or whose interpreter is blocked by a call into C, writes no more. A process that makes no progress writes on:
its beats say for how long it has been in which phase (`rlframe.interprocess.phases`).
"""

from __future__ import annotations

import math
import os
import struct
import sys
import threading
import time
import weakref

from rlframe.interprocess.phases import STARTING, ThreadProgress, describe_stall

VARIABLE = "RLFRAME_HEARTBEAT"  # "DESCRIPTOR:SECONDS", of the page and between two beats
TIMEOUT = 30.0  # seconds without a heartbeat after which a process counts as hung
_STARTING_FACTOR = (
    4.0  # times as long for one that starts: libraries that it loads may hold the interpreter for seconds
)
_INTERVAL_FRACTION, _MAX_INTERVAL = 0.1, 1.0  # of the timeout from beat to beat and from look to look; seconds at most
_watched = threading.Event()  # set if another process watches this one
# The number of the beat; of the phase that is nearest to its deadline: seconds without progress and allowed, name.
_PAGE = struct.Struct("=qdd64s")


class SuspendAwareClock:
    """Seconds since the epoch, less the time in which this process could not look at others.

    If this process or its machine was stopped, so was the clock. Otherwise every process that it watches would seem to
    have been silent meanwhile.

    Args:
        longest: seconds between two ticks that may pass.
    """

    def __init__(self, max_gap: float = 2.0) -> None:
        self._max_gap = max_gap
        self._last_tick = time.monotonic()
        self._offset = time.time() - self._last_tick

    def __call__(self) -> float:
        return self._offset + time.monotonic()

    def tick(self) -> float:
        """Note that this process runs. Return the time."""
        now = time.monotonic()
        self._offset -= max(now - self._last_tick - self._max_gap, 0.0)
        self._last_tick = now
        return self._offset + now


def heartbeat_interval(timeout: float) -> float:
    """Return the seconds from beat to beat, and from look to look."""
    return min(timeout * _INTERVAL_FRACTION, _MAX_INTERVAL)


class HeartbeatMonitor:
    """The watcher's side: the page of one process, which is to be started with `descriptor` and `variables`.

    Args:
        timeout: seconds without a heartbeat after which it counts as hung.
        now: the time, by the clock that `problem` is asked by.

    Attributes:
        timeout: the argument.
        phase: that the process was in at the last look; empty: in none that has a deadline.
        silent: seconds since its last beat, then.
        stuck: seconds without progress in that phase, then.
    """

    def __init__(self, timeout: float, now: float) -> None:
        self.timeout, self._last_beat_at, self._beat = timeout, now, 0
        self.phase, self.silent, self.stuck = STARTING.name, 0.0, 0.0
        self.descriptor = os.memfd_create("rlframe heartbeat")
        weakref.finalize(self, os.close, self.descriptor)
        os.pwrite(self.descriptor, _PAGE.pack(0, 0.0, STARTING.allowed, STARTING.name.encode()), 0)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables by which the process finds its page."""
        return {VARIABLE: f"{self.descriptor}:{heartbeat_interval(self.timeout)}"}

    @property
    def page(self) -> bytes:
        """The page as the process has written it. Set it if another watcher, beside the process, has read it."""
        return os.pread(self.descriptor, _PAGE.size, 0)

    @page.setter
    def page(self, written: bytes) -> None:
        os.pwrite(self.descriptor, written, 0)

    def problem(self, now: float) -> str:
        """Return why the process counts as hung; empty if it does not.

        Args:
            now: the time, by a clock that stands still while the watcher does (see `SuspendAwareClock`): a watcher that was
                stopped has heard no beat.
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
    """Return how long this process waits for others: `watched` seconds if a supervisor kills those that hang."""
    return watched if _watched.is_set() else seconds


def begin() -> None:
    """Start this process's heartbeats, if the process that started it watches it."""
    found = os.environ.pop(VARIABLE, "")  # not for those that this process starts
    if found:
        descriptor, _, interval = found.partition(":")
        os.set_inheritable(int(descriptor), False)
        sender = HeartbeatSender(int(descriptor), float(interval))
        _watched.set()
        threading.Thread(target=sender.run, name="rlframe heartbeat", daemon=True).start()


class HeartbeatSender:
    """The side of the process that is watched.

    Args:
        descriptor: of the page.
        interval: seconds between two beats.
    """

    def __init__(self, descriptor: int, interval: float) -> None:
        self._descriptor, self._interval = descriptor, interval
        self._clock = SuspendAwareClock(2.0 * interval)  # a process that was stopped was at its work no longer for that
        self._progress = ThreadProgress()
        self._beats = 0
        self._has_reported = False

    def run(self) -> None:
        """Beat for ever. The thread needs the interpreter: a process that blocks it stops beating."""
        while True:
            self.beat(self._clock.tick())
            time.sleep(self._interval)

    def beat(self, now: float) -> None:
        """Write one beat. Print where the process hangs, before the watcher ends it."""
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
