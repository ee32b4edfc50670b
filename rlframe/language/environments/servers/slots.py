"""How many requests may be under way at once."""

from __future__ import annotations

import asyncio


class Slots:
    """An asynchronous context manager that so many may be inside of, less where others have a share."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._weight = 1.0
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def free(self) -> int:
        return max(1, int(self.capacity * self._weight)) - self.used

    def set_weight(self, weight: float) -> None:
        """The part of the capacity, from 0 to 1, that may be used; one slot stays in any case."""
        self._weight = min(1.0, max(0.0, weight))
        self._wake()

    async def __aenter__(self) -> Slots:
        while self.free <= 0:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                self._wake()  # this one may have been woken already: its slot is the next one's
                raise
            finally:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
        self.used += 1
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.used -= 1
        self._wake()

    def _wake(self) -> None:
        for _ in range(min(self.free, len(self._waiting))):
            waiter = self._waiting.pop(0)
            if not waiter.done():
                waiter.set_result(None)
