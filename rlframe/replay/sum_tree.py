"""A sum tree. Every operation is vectorized over a batch.

A node has sixteen children instead of two. So a search in one level takes one gather and one small matrix product. The
top level has up to 8192 nodes, and `searchsorted` searches it directly. A tree with 100,000 leaves has one more level
below the top level. A tree with 1,000,000 leaves has two more.
"""

from __future__ import annotations

import numpy as np

from rlframe.replay.timeline import Index

_FANOUT = 16
_MAX_ROOTS = 8192  # maximum number of nodes in the top level
_CUMULATE = np.triu(
    np.ones((_FANOUT, _FANOUT))
)  # row @ _CUMULATE is the cumulative sum of the row; for short rows, this is faster than numpy.cumsum
_COUNT = np.ones(_FANOUT)


class SumTree:
    """Draws indices with probabilities proportional to `leaves` ([size] float64, not negative).

    Use `set` to change leaves. The sums are updated later, when they are needed. Each sum is computed from the node's
    children, so rounding errors do not accumulate.
    """

    def __init__(self, size: int):
        self.levels = []
        while True:
            padded = -(-size // _FANOUT) * _FANOUT
            self.levels.append(np.zeros(padded))
            if padded <= _MAX_ROOTS:
                break
            size = padded // _FANOUT
        self.leaves = self.levels[0]
        self._ranges: list[tuple[int, int]] = []
        self._scattered: list[np.ndarray] = []

    def set(self, index: Index, values: np.ndarray | float) -> None:
        """Set the leaves at `index`."""
        self.leaves[index] = values
        if not isinstance(index, slice):
            self._scattered.append(index)
            return
        low, high = index.start, index.stop
        if self._ranges and self._ranges[-1][0] <= low <= self._ranges[-1][1]:
            low, before = self._ranges.pop()
            high = max(high, before)
        self._ranges.append((low, high))

    @property
    def total(self) -> float:
        """The sum of all leaves."""
        self.refresh()
        return float(self.levels[-1].sum())

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return (drawn indices [count] int64, probabilities of these indices [count] float32).

        The draws are stratified, as in Schaul et al. 2016, B.2.1: the total is split into `count` equal parts, and one
        index is drawn from each part. The total must be positive.
        """
        self.refresh()
        running = self.levels[-1].cumsum()
        total = running[-1]
        mass = rng.random(count)
        mass += np.arange(count)
        mass *= total / count
        indices = self._descend(mass, running)
        values = self.leaves.take(indices)
        while not values.all():  # a rounding error selected a leaf of 0, so draw again
            empty = (values == 0).nonzero()[0]
            indices[empty] = self._descend(rng.random(len(empty)) * total, running)
            values = self.leaves.take(indices)
        return indices, (values / total).astype(np.float32)

    def _descend(self, mass: np.ndarray, running: np.ndarray) -> np.ndarray:
        node = running.searchsorted(mass, side="right")
        np.minimum(node, len(running) - 1, out=node)
        rows = np.arange(0, len(mass) * _FANOUT, _FANOUT)
        if len(self.levels) > 1:
            mass = mass - running.take(node) + self.levels[-1].take(node)
        for depth in range(len(self.levels) - 2, -1, -1):
            values = self.levels[depth].reshape(-1, _FANOUT).take(node, axis=0)
            sums = values @ _CUMULATE
            child = (sums > mass[:, None]).argmax(axis=1)
            if depth:
                at = rows + child
                mass -= sums.ravel().take(at) - values.ravel().take(at)
            node = node * _FANOUT + child
        return node

    def refresh(self) -> None:
        """Compute again all sums that include a changed leaf."""
        ranges, scattered = self._ranges, self._scattered
        self._ranges, self._scattered = [], []
        if len(ranges) > 8 or len(scattered) > 8:
            points = [np.arange(low // _FANOUT, -(-high // _FANOUT)) * _FANOUT for low, high in ranges]
            ranges, scattered = (
                [],
                [np.unique(np.concatenate(points + [index // _FANOUT * _FANOUT for index in scattered]))],
            )
        for low, high in ranges:
            for below, above in zip(self.levels, self.levels[1:]):
                low, high = low // _FANOUT, -(-high // _FANOUT)
                above[low:high] = below[low * _FANOUT : high * _FANOUT].reshape(-1, _FANOUT) @ _COUNT
        for index in scattered:
            node = index
            for below, above in zip(self.levels, self.levels[1:]):
                node = node // _FANOUT
                above[node] = below.reshape(-1, _FANOUT).take(node, axis=0) @ _COUNT
