"""Several samplers of a Reverb server, which look like one."""

from __future__ import annotations

import collections
import threading
from typing import Any

import numpy as np

_JOIN_WITHIN = 10.0  # seconds; a sampler that is closed lets its thread go at once


class Samplers:
    """Draws with several of Reverb's samplers at once, each drained by a thread: one alone waits for its round trips.

    No draw lies with a thread or a sampler while others are waited for, so a rate limiter that lets through just enough
    for a batch is enough. Draws come in no order, so a queue has one sampler.

    Args:
        samplers: of one table, without end.
        ahead: draws that may wait here.
    """

    def __init__(self, samplers: list[Any], ahead: int) -> None:
        self._samplers, self._ahead = samplers, ahead
        self._drawn: collections.deque[list[np.ndarray]] = collections.deque()
        self._wanted = ahead  # draws that the reader waits for, or where the threads stop while it does not
        self._changed = threading.Condition()
        self._failure: RuntimeError | None = None
        self._threads = [
            threading.Thread(target=self._drain, args=(sampler,), name="rlframe reverb sampler", daemon=True)
            for sampler in samplers
        ]
        for thread in self._threads:
            thread.start()

    def draw(self, count: int) -> list[list[np.ndarray]]:
        """Waits for `count` draws. Each is [key uint64, probability, size of the table, priority, *columns].

        Raises:
            RuntimeError: as Reverb's sampler does, also when it was closed.
        """
        with self._changed:
            self._wanted = count
            self._changed.notify_all()
            while len(self._drawn) < count and self._failure is None:
                self._changed.wait()
            self._wanted = self._ahead
            if len(self._drawn) < count and self._failure is not None:
                raise self._failure
            drawn = [self._drawn.popleft() for _ in range(count)]
            self._changed.notify_all()
            return drawn

    def Close(self) -> None:
        """Ends a `draw` that waits, and the threads: none is inside of a sampler afterwards. Any thread may call it."""
        with self._changed:
            self._failure = self._failure or RuntimeError("The samplers were closed.")
            self._changed.notify_all()
        for sampler in self._samplers:
            sampler.Close()
        # A process that ends while a thread is inside of a sampler is aborted by it.
        for thread in self._threads:
            thread.join(timeout=_JOIN_WITHIN)

    def _drain(self, sampler: Any) -> None:
        drawn, draw = self._drawn, sampler.GetNextTrajectory  # raises when the sampler is closed
        try:
            while True:
                drawn.append(draw())
                if len(drawn) >= self._wanted:
                    with self._changed:
                        self._changed.notify_all()
                        while len(drawn) >= max(self._ahead, self._wanted) and self._failure is None:
                            self._changed.wait()
        except RuntimeError as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
