"""Items that are drawn by their priorities."""

from __future__ import annotations

import numpy as np

from rlframe.errors import UsageError
from rlframe.replay.sum_tree import SumTree
from rlframe.replay.tables import ItemTable
from rlframe.replay.timeline import Index, Timeline

LOWEST = 1e-8  # priority: so that an item with none can still be drawn


class PrioritisedTable(ItemTable):
    """Items with chances proportional to priority^exponent (Schaul et al. 2016).

    New ones get the highest priority so far.
    """

    _scalars = (*ItemTable._scalars, "highest", "dropped")

    def __init__(self, timeline: Timeline, exponent: float):
        super().__init__(timeline)
        self._tree = SumTree(timeline.slots)
        self._exponent = exponent
        self.highest = 1.0
        self.dropped = 0  # updates of items that were gone

    def _push_block(self, first: int, index: Index, count: int, mask: np.ndarray | None, shared: bool) -> None:
        leaf, leaves = self.highest**self._exponent, self._tree.leaves
        leaves[index] = leaf if mask is None else np.where(mask, leaf, leaves[index])
        self._tree.touch(index)

    def _push(self, starts: np.ndarray) -> None:
        index = self._timeline.slot(starts)
        self._tree.leaves[index] = self.highest**self._exponent
        self._tree.touch(index)

    def evict(self, index: Index) -> None:
        super().evict(index)
        self._tree.leaves[index] = 0.0
        self._tree.touch(index)

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns (starts [count] int64, probabilities [count] float32)."""
        slots, probabilities = self._tree.draw(count, rng)
        return self._timeline.living(slots), probabilities

    def update(self, starts: np.ndarray, priorities: np.ndarray) -> None:
        """Sets the priorities of the items `starts`; of one that comes twice, the last counts."""
        priorities = check_priorities(priorities, len(starts))
        there = self.holds(starts)
        if not there.all():
            self.dropped += int(np.count_nonzero(~there))
            starts, priorities = starts[there], priorities[there]
        if not len(starts):
            return
        self.highest = max(self.highest, float(priorities.max()))
        index = self._timeline.slot(starts)
        self._tree.leaves[index] = np.maximum(priorities, LOWEST) ** self._exponent
        self._tree.touch(index)

    def numbers(self) -> np.ndarray:
        return self._timeline.living(self._present.nonzero()[0])

    def leaves(self, numbers: np.ndarray) -> np.ndarray:
        """What the items `numbers` count for: priority^exponent."""
        return self._tree.leaves.take(self._timeline.slot(numbers))

    def set_leaves(self, numbers: np.ndarray, leaves: np.ndarray) -> None:
        """The inverse of `leaves`, of items that are there."""
        index = self._timeline.slot(numbers)
        self._tree.leaves[index] = leaves
        self._tree.touch(index)

    def arrays(self) -> dict[str, np.ndarray]:
        self._tree.refresh()
        return {**super().arrays(), **{f"tree{i}": level for i, level in enumerate(self._tree.levels)}}


def check_priorities(priorities: np.ndarray, count: int) -> np.ndarray:
    """Returns `priorities` as [count] float64. Raises `UsageError` unless they are finite and not negative."""
    priorities = np.asarray(priorities, np.float64)
    lowest, highest = priorities.min(initial=np.inf), priorities.max(initial=0.0)
    if priorities.shape != (count,) or not lowest >= 0 or not highest < np.inf:  # also where one is NaN
        raise UsageError(
            f"update_priorities expected {count} finite priorities that are not negative, one for each key; "
            f"got shape {priorities.shape}, from {lowest} to {highest}."
        )
    return priorities
