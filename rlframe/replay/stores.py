"""Arrays with one row per slot."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlframe.replay.layout import Leaf, TreeLayout
from rlframe.replay.outputs import Outputs
from rlframe.replay.timeline import Index


class RowStore:
    """Keeps rows as they came."""

    def __init__(self, leaf: Leaf, slots: int):
        self.leaf = leaf
        self.data = np.zeros((slots, *leaf.shape), leaf.dtype)  # zero pages: memory is touched as it fills

    @staticmethod
    def bytes_needed(leaf: Leaf, slots: int) -> int:
        """Bytes that a store of `slots` rows takes when it is full."""
        return leaf.nbytes * slots

    def write(self, index: Index, values: Any) -> None:
        """Stores `values` [B, ...] at `index`."""
        self.data[index] = values

    def read(self, slots: np.ndarray, outputs: Outputs, name: str = "") -> np.ndarray:
        """Returns the rows `slots` (any shape; below 0 counts from the end), `[*slots.shape, ...]`."""
        return outputs.take(self.data, slots, name)

    def arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint must hold."""
        return {self.leaf.name: self.data}


class TreeStore:
    """One `RowStore` for each leaf of a tree."""

    def __init__(self, layout: TreeLayout, slots: int):
        self._layout = layout
        self.stores = [RowStore(leaf, slots) for leaf in layout.leaves]
        self._single = self.stores[0] if layout.is_leaf else None

    def write(self, index: Index, tree: Any) -> None:
        """Stores the tree of `[B, ...]` at `index`."""
        if self._single is not None:
            self._single.data[index] = tree
            return
        for store, values in zip(self.stores, self._layout.split(tree)):
            store.data[index] = values

    def read(self, slots: np.ndarray, outputs: Outputs) -> Any:
        """Returns the tree of the rows `slots`."""
        if self._single is not None:
            return self._single.read(slots, outputs)
        return self._layout.build([store.read(slots, outputs) for store in self.stores])

    def arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint must hold."""
        return {store.leaf.name: store.data for store in self.stores}
