"""The time by which a coordinator judges its workers."""

from __future__ import annotations

import time


class Clock:
    """Seconds since the epoch by which workers are judged: it rises while the coordinator listens to them.

    Where this process was stopped, or its machine was, the clock was too: that nobody was heard meanwhile is no
    worker's fault.
    """

    _LONGEST = 2.0  # seconds between two ticks that may pass

    def __init__(self) -> None:
        self._ticked = time.monotonic()
        self._offset = time.time() - self._ticked

    def __call__(self) -> float:
        return self._offset + time.monotonic()

    def tick(self) -> None:
        """The coordinator listens."""
        now = time.monotonic()
        self._offset -= max(now - self._ticked - self._LONGEST, 0.0)
        self._ticked = now
