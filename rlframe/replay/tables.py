"""Which items there are, and which are drawn: a class for each kind of `ReplaySpec`.

An item is known by its `start`, the number of its first timestep (timeline.py), and leaves when that is overwritten.
"""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from rlframe.replay.base import STATS
from rlframe.replay.sum_tree import SumTree
from rlframe.replay.timeline import Index, Mask, Timeline, numbers_of, ring_index

MIN_PRIORITY = 1e-8  # priority: so that an item with none can still be drawn


class ItemTable(abc.ABC):
    """Marks the slots at which an item starts, and counts. Readers draw from it; the table of a writer is not drawn."""

    dropped = 0  # updates of priorities of items that were gone

    def __init__(self, timeline: Timeline):
        self._timeline = timeline
        self._present = np.zeros(timeline.slots, bool)
        self.size = 0
        self.added = self.evicted = self.evicted_unsampled = 0

    def append_block(self, first: int, index: Index, count: int, mask: Mask, shared: bool = False) -> None:
        """Note the items that start at the `count` numbers from `first` (of these, the `mask`), in the slots `index`.

        `shared`: other items of the block may have been noted already.
        """
        if self._timeline.is_evicted(first):  # a slow writer's: at least some are gone already
            self.append(numbers_of(first, count, mask))
            return
        if isinstance(mask, bool):
            self._present[index], number = True, count
        else:
            self._present[index] |= mask
            number = int(np.count_nonzero(mask))
        self.size += number
        self.added += number
        self._push_block(first, index, count, mask, shared)

    def append(self, starts: np.ndarray) -> None:
        """Note the items that start at the numbers `starts`, of which some may be gone already."""
        late = self._timeline.is_evicted(starts)
        if late.any():
            gone = int(np.count_nonzero(late))
            self.added += gone
            self.evicted += gone
            self.evicted_unsampled += gone
            starts = starts[~late]
        if len(starts):
            self._present[self._timeline.slots_of(starts)] = True
            self.size += len(starts)
            self.added += len(starts)
            self._push(starts)

    @abc.abstractmethod
    def _push(self, starts: np.ndarray) -> None:
        """Note the items `starts`, which are new and not gone."""

    @abc.abstractmethod
    def _push_block(self, first: int, index: Index, count: int, mask: Mask, shared: bool) -> None:
        """Note the items of `append_block`, which are new and not gone."""

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return (starts [count] int64, probabilities [count] float32) of items; there must be some."""
        raise NotImplementedError

    def update(self, starts: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities of the items `starts`. Only a `PrioritizedTable` has priorities."""
        raise NotImplementedError

    def evict(self, index: Index) -> None:
        """Drop the items that start in the slots `index`, which are given up."""
        gone = int(np.count_nonzero(self._present[index]))
        if gone:
            self._present[index] = False
            self.size -= gone
            self.evicted += gone
            self._advance(gone)

    def holds(self, starts: np.ndarray) -> np.ndarray:
        """[B] bool: whether the items `starts` are still there."""
        return self._timeline.holds(starts) & self._present[self._timeline.slots_of(starts)]

    def starts(self) -> np.ndarray:
        """[size] int64: the starts of the items that are there."""
        raise NotImplementedError

    @property
    def weight(self) -> float:
        """The sum of the weights of all items. A draw from several tables chooses each in proportion to it."""
        return float(self.size)

    def _advance(self, gone: int) -> None:  # noqa: B027  nothing to do where there is no order
        """`gone` items left."""

    def stats(self, steps: int, sampled: int, nbytes: int) -> dict[str, int]:
        """Return the counters of a buffer, see `BaseReplayBuffer.stats`, of which it knows the items'."""
        items = self.size, steps, self.added, sampled, self.evicted, self.evicted_unsampled
        return dict(zip(STATS, (*items, self.dropped, nbytes)))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that a checkpoint must hold. See `state`, too."""
        return {"present": self._timeline.used(self._present)}

    def state(self) -> dict[str, Any]:
        """Return the scalars that a checkpoint must hold."""
        return {key: getattr(self, key) for key in self._scalars}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        for key in self._scalars:
            setattr(self, key, state[key])

    _scalars: tuple[str, ...] = ("size", "added", "evicted", "evicted_unsampled")


class Ring(ItemTable):
    """Items in the order of their completion.

    With n-step items or asynchronous environments a younger item may start, and so leave, before an older one: then
    dead entries stay between `tail` and `end` until the tail has passed them, and readers must skip them.
    """

    _scalars = (*ItemTable._scalars, "tail", "end", "ordered", "last")
    # Blocks that follow each other are written to the ring together, when it is needed: numbers from, to.
    _pending = (0, 0)

    def __init__(self, timeline: Timeline):
        super().__init__(timeline)
        # Entries between a living tail and the end started less than two laps ago, each at a number of its own.
        self._starts = np.zeros(2 * timeline.slots, np.int64)
        self.tail = self.end = 0  # positions, ever growing
        self.ordered = True  # no entry started before the one to its left
        self.last = -1

    def _push(self, starts: np.ndarray) -> None:
        self._write_pending()
        self.ordered = self.ordered and bool((starts[1:] > starts[:-1]).all())
        self._write(starts)

    def _push_block(self, first: int, index: Index, count: int, mask: Mask, shared: bool) -> None:
        low, high = self._pending
        if not shared and first == high and low < high:
            self._pending = low, high + count
            return
        self._write_pending()
        if shared:
            self._write(numbers_of(first, count, mask))
        else:
            self._pending = first, first + count

    def _write_pending(self) -> None:
        """Write the items of the pending blocks to the ring."""
        low, high = self._pending
        if low == high:
            return
        self._pending = 0, 0
        index = self._timeline.index(low, high - low)
        self._write(low + self._present[index].nonzero()[0])

    def evict(self, index: Index) -> None:
        self._write_pending()
        super().evict(index)

    def state(self) -> dict[str, Any]:
        self._write_pending()
        return super().state()

    def _write(self, starts: np.ndarray) -> None:
        size = len(starts)
        if self.end + size - self.tail > len(self._starts):
            self._compact()
        if self.ordered and size:
            self.ordered = starts.item(0) > self.last
            self.last = starts.item(size - 1)
        self._starts[ring_index(self.end, size, len(self._starts))] = starts
        self.end += size

    def _compact(self) -> None:
        """Drop the dead entries. Needed only if a writer pauses, so that its living items hold the tail."""
        entries = np.arange(self.tail, self.end)
        live = self._starts[entries[self._is_live(entries)] % len(self._starts)]
        self.tail, self.end = 0, len(live)
        self._starts[: self.end] = live

    def _advance(self, gone: int) -> None:
        if self.ordered:
            self.tail += gone
            return
        while self.tail < self.end:
            window = np.arange(self.tail, min(self.end, self.tail + gone + 64))
            live = self._is_live(window)
            first = int(live.argmax())
            if live[first]:
                self.tail += first
                return
            self.tail += len(window)

    def starts(self) -> np.ndarray:
        """Return the starts of the items that are there, in order."""
        self._write_pending()
        positions = np.arange(self.tail, self.end)
        starts = self._starts[positions % len(self._starts)]
        return starts if self.ordered else starts[~self._timeline.is_evicted(starts)]

    def _is_live(self, positions: np.ndarray) -> np.ndarray:
        return ~self._timeline.is_evicted(self._starts[positions % len(self._starts)])

    def arrays(self) -> dict[str, np.ndarray]:
        return {**super().arrays(), "starts": self._starts[: self.end]}


class UniformTable(Ring):
    """Every item with the same chance, with replacement."""

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return (starts [count] int64, probabilities [count] float32)."""
        self._write_pending()
        starts = self._draw_starts(count, rng)
        if not self.ordered:
            # Dead entries are few: draw again instead of them, so that all living ones keep the same chance.
            while 1 in (evicted_draws := self._timeline.is_evicted(starts)).tobytes():
                starts[evicted_draws] = self._draw_starts(int(np.count_nonzero(evicted_draws)), rng)
        return starts, _full(count, 1.0 / self.size)

    def _draw_starts(self, count: int, rng: np.random.Generator) -> np.ndarray:
        # A quarter of the time of `rng.integers`, and as even as doubles are: to one part in 2^53 / size.
        draws = rng.random(count)
        draws *= float(self.end - self.tail)
        positions = draws.astype(np.int64)
        low = self.tail % len(self._starts)
        if low + self.end - self.tail <= len(self._starts):
            return self._starts[low:].take(positions, mode="clip")
        positions += low
        return self._starts.take(positions, mode="wrap")


class QueueTable(Ring):
    """Every item once, the oldest first."""

    def draw(self, count: int, rng: np.random.Generator | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Take `count` items, of which there must be enough, out of the queue."""
        self._write_pending()
        probabilities = _full(count, 1.0 / self.size)
        chosen = np.arange(self.tail, self.tail + count)
        if not self.ordered:
            chosen = self._first_live(count)
        starts = self._starts[chosen % len(self._starts)]
        self.tail = int(chosen[-1]) + 1
        self._present[self._timeline.slots_of(starts)] = False
        self.size -= count
        return starts, probabilities

    def forget_before(self, version: int, versions: np.ndarray) -> int:
        """Drop the items that a version below `version` acted in (`versions`: of each slot). Return how many."""
        starts = self.starts()
        slots = self._timeline.slots_of(starts)
        old = versions.take(slots, mode="wrap") < version
        gone = int(np.count_nonzero(old))
        if gone:
            self._present[slots[old]] = False
            self.tail, self.end = 0, len(starts) - gone
            self._starts[: self.end] = starts[~old]
            self.size -= gone
            self.evicted += gone
            self.evicted_unsampled += gone
        return gone

    def _first_live(self, count: int) -> np.ndarray:
        """Return the positions of the `count` oldest living entries, of which there must be enough."""
        width = count
        while True:
            width = min(2 * width, self.end - self.tail)
            window = np.arange(self.tail, self.tail + width)
            live = window[self._is_live(window)]
            if len(live) >= count:
                return live[:count]

    def _advance(self, gone: int) -> None:
        self.evicted_unsampled += gone
        super()._advance(gone)


def _full(count: int, value: float) -> np.ndarray:
    array = np.empty(count, np.float32)
    array.fill(value)
    return array


class PrioritizedTable(ItemTable):
    """Items with chances proportional to priority^exponent (Schaul et al. 2016).

    New ones get the highest priority so far.
    """

    _scalars = (*ItemTable._scalars, "highest", "dropped")

    def __init__(self, timeline: Timeline, exponent: float):
        super().__init__(timeline)
        self._tree = SumTree(timeline.slots)
        self._exponent = exponent
        self.highest = 1.0

    def _push_block(self, first: int, index: Index, count: int, mask: Mask, shared: bool) -> None:
        leaf = self.highest**self._exponent
        self._tree.set(index, leaf if isinstance(mask, bool) else np.where(mask, leaf, self._tree.leaves[index]))

    def _push(self, starts: np.ndarray) -> None:
        self._tree.set(self._timeline.slots_of(starts), self.highest**self._exponent)

    def evict(self, index: Index) -> None:
        super().evict(index)
        self._tree.set(index, 0.0)

    @property
    def weight(self) -> float:
        return self._tree.total

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return (starts [count] int64, probabilities [count] float32)."""
        slots, probabilities = self._tree.draw(count, rng)
        return self._timeline.numbers_in(slots), probabilities

    def update(self, starts: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities of the items `starts`; of one that comes twice, the last counts."""
        there = self.holds(starts)
        if not there.all():
            self.dropped += int(np.count_nonzero(~there))
            starts, priorities = starts[there], priorities[there]
        if not len(starts):
            return
        self.highest = max(self.highest, float(priorities.max()))
        self._tree.set(self._timeline.slots_of(starts), np.maximum(priorities, MIN_PRIORITY) ** self._exponent)

    def starts(self) -> np.ndarray:
        return self._timeline.numbers_in(self._present.nonzero()[0])

    def leaves(self, starts: np.ndarray) -> np.ndarray:
        """Return the weights of the items `starts`: priority^exponent."""
        return self._tree.leaves.take(self._timeline.slots_of(starts))

    def set_leaves(self, starts: np.ndarray, leaves: np.ndarray) -> None:
        """Set the weights of the items `starts`, which are there."""
        self._tree.set(self._timeline.slots_of(starts), leaves)

    def arrays(self) -> dict[str, np.ndarray]:
        self._tree.refresh()
        return {**super().arrays(), **{f"tree{i}": level for i, level in enumerate(self._tree.levels)}}
