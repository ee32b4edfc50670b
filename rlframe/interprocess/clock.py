"""The time by which a process judges others."""

from __future__ import annotations

import time


class Clock:
    """Seconds since the epoch by which others are judged: it rises while this process looks at them.

    Where this process was stopped, or its machine was, the clock was too: that nobody was heard meanwhile is nobody's
    fault.

    Args:
        longest: seconds between two ticks that may pass.
    """

    def __init__(self, longest: float = 2.0) -> None:
        self._longest = longest
        self._ticked = time.monotonic()
        self._offset = time.time() - self._ticked

    def __call__(self) -> float:
        return self._offset + time.monotonic()

    def tick(self) -> float:
        """This process looks, or listens. Returns the time."""
        now = time.monotonic()
        self._offset -= max(now - self._ticked - self._longest, 0.0)
        self._ticked = now
        return self._offset + now
