"""Which items there are, and which are drawn: one class for each kind of `ReplaySpec`.

Items are known by the number of their first timestep, and leave when it is overwritten.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlframe.replay.timeline import Index, Numbers, Timeline


class ItemTable:
    """Marks the slots at which an item starts, and counts."""

    def __init__(self, timeline: Timeline):
        self._timeline = timeline
        self._present = np.zeros(timeline.slots, bool)
        self.size = 0
        self.added = self.evicted = self.evicted_unsampled = 0

    def append(self, starts: Numbers, count: int) -> None:
        """Notes the items `starts`: a block of `count` numbers, or an array."""
        self._present[self._timeline.index(starts, count)] = True
        self.size += count
        self.added += count

    def evict(self, index: Index) -> None:
        """Drops the items that start in the slots `index`, which are about to be overwritten."""
        gone = int(np.count_nonzero(self._present[index]))
        if gone:
            self._present[index] = False
            self.size -= gone
            self.evicted += gone
            self._advance(gone)

    def holds(self, starts: np.ndarray) -> np.ndarray:
        """[B] bool: whether the items `starts` are still there."""
        living = (starts >= self._timeline.oldest) & (starts < self._timeline.head)
        return living & self._present[starts % self._timeline.slots]

    def _advance(self, gone: int) -> None:
        """`gone` items left."""

    def arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint must hold, beside `state`."""
        return {"present": self._present}

    def state(self) -> dict[str, Any]:
        """The scalars that a checkpoint must hold."""
        return {key: getattr(self, key) for key in self._scalars}

    def set_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        for key in self._scalars:
            setattr(self, key, state[key])

    _scalars: tuple[str, ...] = ("size", "added", "evicted", "evicted_unsampled")


class _Ring(ItemTable):
    """Items in the order of their completion.

    With n-step items or asynchronous environments a younger item may start, and so leave, before an older one: then
    dead entries stay between `tail` and `end` until the tail has passed them, and readers must skip them.
    """

    _scalars = (*ItemTable._scalars, "tail", "end", "ordered", "last")

    def __init__(self, timeline: Timeline):
        super().__init__(timeline)
        # Entries between a living tail and the end started less than two laps ago, each at a number of its own.
        self._starts = np.zeros(2 * timeline.slots, np.int64)
        self.tail = self.end = 0  # positions, ever growing
        self.ordered = True  # no entry started before the one to its left
        self.last = -1

    def append(self, starts: Numbers, count: int) -> None:
        super().append(starts, count)
        if isinstance(starts, int):
            first, last, starts = starts, starts + count - 1, np.arange(starts, starts + count)
        else:
            first, last = int(starts[0]), int(starts[-1])
            self.ordered = self.ordered and bool((starts[1:] > starts[:-1]).all())
        self.ordered = self.ordered and first > self.last
        self.last = last
        low = self.end % len(self._starts)
        if low + count <= len(self._starts):
            self._starts[low : low + count] = starts
        else:
            self._starts[np.arange(low, low + count) % len(self._starts)] = starts
        self.end += count

    def _advance(self, gone: int) -> None:
        if self.ordered:
            self.tail += gone
            return
        while self.tail < self.end:
            window = np.arange(self.tail, min(self.end, self.tail + gone + 64))
            living = self._living(window)
            first = int(living.argmax())
            if living[first]:
                self.tail += first
                return
            self.tail += len(window)

    def _living(self, positions: np.ndarray) -> np.ndarray:
        return self._starts.take(positions, mode="wrap") >= self._timeline.oldest

    def arrays(self) -> dict[str, np.ndarray]:
        return {**super().arrays(), "starts": self._starts}


class UniformTable(_Ring):
    """Every item with the same chance, with replacement."""

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns (starts [count] int64, probabilities [count] float32)."""
        starts = self._starts.take(rng.integers(self.tail, self.end, count), mode="wrap")
        if not self.ordered:
            oldest = self._timeline.oldest
            while (dead := starts < oldest).any():
                again = rng.integers(self.tail, self.end, int(np.count_nonzero(dead)))
                starts[dead] = self._starts.take(again, mode="wrap")
        return starts, np.full(count, 1.0 / self.size, np.float32)


class QueueTable(_Ring):
    """Every item once, the oldest first."""

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Takes `count` items, of which there must be enough, out of the queue."""
        probabilities = np.full(count, 1.0 / self.size, np.float32)
        chosen = np.arange(self.tail, self.tail + count if self.ordered else self.end)
        if not self.ordered:
            chosen = chosen[self._living(chosen)][:count]
        starts = self._starts.take(chosen, mode="wrap")
        self.tail = int(chosen[-1]) + 1
        self._present[starts % self._timeline.slots] = False
        self.size -= count
        return starts, probabilities

    def _advance(self, gone: int) -> None:
        self.evicted_unsampled += gone
        super()._advance(gone)
