"""Tables of a replay's items. A table draws items. There is one table class for each `ReplaySpec.kind`.

An item is identified by its `start`, the number of its first timestep (timeline.py). An item is evicted when its first
timestep is overwritten.
"""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from rlframe.replay.base import STATS
from rlframe.replay.sum_tree import SumTree
from rlframe.replay.timeline import Index, Mask, Timeline, numbers_of, ring_index

MIN_PRIORITY = 1e-8  # an item with priority 0 gets this priority, so that it can be drawn


class ItemTable(abc.ABC):
    """Marks the slots where items start, and counts items.

    A reader draws from its table. A writer only adds to its table.
    """

    dropped = 0  # number of priority updates for evicted items

    def __init__(self, timeline: Timeline):
        self._timeline = timeline
        self._present = np.zeros(timeline.slots, bool)
        self.size = 0
        self.added = self.evicted = self.evicted_unsampled = 0

    def append_block(self, first: int, index: Index, count: int, mask: Mask, shared: bool = False) -> None:
        """Add the items that start in a block of timesteps.

        Args:
            first: the first number of the block.
            index: the slots of the block.
            count: the number of timesteps in the block.
            mask: selects the timesteps at which items start.
            shared: True if the table may already contain other items of the block.
        """
        if self._timeline.is_evicted(first):  # a slow writer: some items of the block are already evicted
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
        """Add the items that start at the numbers `starts`. Items that are already evicted are only counted."""
        late = self._timeline.is_evicted(starts)
        if late.any():
            num_evicted = int(np.count_nonzero(late))
            self.added += num_evicted
            self.evicted += num_evicted
            self.evicted_unsampled += num_evicted
            starts = starts[~late]
        if len(starts):
            self._present[self._timeline.slots_of(starts)] = True
            self.size += len(starts)
            self.added += len(starts)
            self._push(starts)

    @abc.abstractmethod
    def _push(self, starts: np.ndarray) -> None:
        """Add the items `starts`. They are new and not evicted."""

    @abc.abstractmethod
    def _push_block(self, first: int, index: Index, count: int, mask: Mask, shared: bool) -> None:
        """Add the items of a block (see `append_block`). They are new and not evicted."""

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return (starts [count] int64, probabilities [count] float32) of items. The table must not be empty."""
        raise NotImplementedError

    def update(self, starts: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities of the items `starts`. Only a `PrioritizedTable` has priorities."""
        raise NotImplementedError

    def evict(self, index: Index) -> None:
        """Evict the items that start in the slots `index`."""
        num_evicted = int(np.count_nonzero(self._present[index]))
        if num_evicted:
            self._present[index] = False
            self.size -= num_evicted
            self.evicted += num_evicted
            self._advance(num_evicted)

    def holds(self, starts: np.ndarray) -> np.ndarray:
        """Return a mask [B] bool that is True for the items of `starts` that are still present."""
        return self._timeline.holds(starts) & self._present[self._timeline.slots_of(starts)]

    def starts(self) -> np.ndarray:
        """Return the starts of all items, [size] int64."""
        raise NotImplementedError

    @property
    def weight(self) -> float:
        """The sum of the items' weights. To draw from several tables, choose a table in proportion to this sum."""
        return float(self.size)

    def _advance(self, num_evicted: int) -> None:  # noqa: B027  a table without an order does nothing here
        """Update the table's own data after `num_evicted` items were evicted."""

    def stats(self, steps: int, sampled: int, nbytes: int) -> dict[str, int]:
        """Return the counters of `BaseReplayBuffer.stats`."""
        items = self.size, steps, self.added, sampled, self.evicted, self.evicted_unsampled
        return dict(zip(STATS, (*items, self.dropped, nbytes)))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that a checkpoint must contain, in addition to `state`."""
        return {"present": self._timeline.used(self._present)}

    def state(self) -> dict[str, Any]:
        """Return the scalars that a checkpoint must contain."""
        return {key: getattr(self, key) for key in self._scalars}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the scalars that `state` returned."""
        for key in self._scalars:
            setattr(self, key, state[key])

    _scalars: tuple[str, ...] = ("size", "added", "evicted", "evicted_unsampled")


class Ring(ItemTable):
    """A ring of items in the order of their completion.

    With n-step items or asynchronous environments, this is not always the order of the starts. Items are evicted in the
    order of the starts. So there can be evicted entries between `tail` and `end`, and a draw must skip these entries.
    """

    _scalars = (*ItemTable._scalars, "tail", "end", "ordered", "last")
    # (first number, end) of adjacent blocks that are not in the ring yet. They are written together when needed.
    _pending = (0, 0)

    def __init__(self, timeline: Timeline):
        super().__init__(timeline)
        # Twice the number of slots suffices: if the tail's item is not evicted, all items up to the end have different
        # starts, and started less than two laps ago.
        self._starts = np.zeros(2 * timeline.slots, np.int64)
        self.tail = self.end = 0  # positions in the ring; they increase, except in `_compact`
        self.ordered = True  # True if the starts never decrease
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
        """Remove evicted entries. The ring is full of these if a writer pauses, because its items block the tail."""
        entries = np.arange(self.tail, self.end)
        live = self._starts[entries[self._is_live(entries)] % len(self._starts)]
        self.tail, self.end = 0, len(live)
        self._starts[: self.end] = live

    def _advance(self, num_evicted: int) -> None:
        if self.ordered:
            self.tail += num_evicted
            return
        while self.tail < self.end:
            window = np.arange(self.tail, min(self.end, self.tail + num_evicted + 64))
            live = self._is_live(window)
            first = int(live.argmax())
            if live[first]:
                self.tail += first
                return
            self.tail += len(window)

    def starts(self) -> np.ndarray:
        """Return the starts of all items, in order."""
        self._write_pending()
        positions = np.arange(self.tail, self.end)
        starts = self._starts[positions % len(self._starts)]
        return starts if self.ordered else starts[~self._timeline.is_evicted(starts)]

    def _is_live(self, positions: np.ndarray) -> np.ndarray:
        return ~self._timeline.is_evicted(self._starts[positions % len(self._starts)])

    def arrays(self) -> dict[str, np.ndarray]:
        return {**super().arrays(), "starts": self._starts[: self.end]}


class UniformTable(Ring):
    """Draws items uniformly, with replacement."""

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return (starts [count] int64, probabilities [count] float32)."""
        self._write_pending()
        starts = self._draw_starts(count, rng)
        if not self.ordered:
            # Some draws may hit evicted entries. Draw again for these, so that all live items have equal probabilities.
            # `1 in tobytes()` is `any()`, but several times as fast for short arrays.
            while 1 in (evicted_draws := self._timeline.is_evicted(starts)).tobytes():
                starts[evicted_draws] = self._draw_starts(int(np.count_nonzero(evicted_draws)), rng)
        return starts, _full(count, 1.0 / self.size)

    def _draw_starts(self, count: int, rng: np.random.Generator) -> np.ndarray:
        # `rng.integers` would take four times as long. The rounding of doubles causes a bias of at most size / 2^53.
        draws = rng.random(count)
        draws *= float(self.end - self.tail)
        positions = draws.astype(np.int64)
        low = self.tail % len(self._starts)
        if low + self.end - self.tail <= len(self._starts):
            return self._starts[low:].take(positions, mode="clip")
        positions += low
        return self._starts.take(positions, mode="wrap")


class QueueTable(Ring):
    """Draws each item once. Older items are drawn first."""

    def draw(self, count: int, rng: np.random.Generator | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Remove the `count` oldest items, and return (starts, probabilities). The table must have that many items."""
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
        """Drop the items with a policy version below `version`. Return the number of dropped items.

        `versions` contains the policy version of the item that starts in each slot.
        """
        starts = self.starts()
        slots = self._timeline.slots_of(starts)
        old = versions.take(slots, mode="wrap") < version
        num_evicted = int(np.count_nonzero(old))
        if num_evicted:
            self._present[slots[old]] = False
            self.tail, self.end = 0, len(starts) - num_evicted
            self._starts[: self.end] = starts[~old]
            self.size -= num_evicted
            self.evicted += num_evicted
            self.evicted_unsampled += num_evicted
        return num_evicted

    def _first_live(self, count: int) -> np.ndarray:
        """Return the positions of the `count` oldest live entries. The ring must have that many live entries."""
        width = count
        while True:
            width = min(2 * width, self.end - self.tail)
            window = np.arange(self.tail, self.tail + width)
            live = window[self._is_live(window)]
            if len(live) >= count:
                return live[:count]

    def _advance(self, num_evicted: int) -> None:
        self.evicted_unsampled += num_evicted
        super()._advance(num_evicted)


def _full(count: int, value: float) -> np.ndarray:
    array = np.empty(count, np.float32)
    array.fill(value)
    return array


class PrioritizedTable(ItemTable):
    """Draws items with probabilities proportional to priority^exponent (Schaul et al. 2016).

    A new item gets the highest priority so far.
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
        """Set the priorities of the items `starts`. If an item occurs twice, the later priority is used."""
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
        """Return the weights of the items `starts`. An item's weight is priority^exponent."""
        return self._tree.leaves.take(self._timeline.slots_of(starts))

    def set_leaves(self, starts: np.ndarray, leaves: np.ndarray) -> None:
        """Set the weights of the items `starts`. All these items must be present."""
        self._tree.set(self._timeline.slots_of(starts), leaves)

    def arrays(self) -> dict[str, np.ndarray]:
        self._tree.refresh()
        return {**super().arrays(), **{f"tree{i}": level for i, level in enumerate(self._tree.levels)}}
