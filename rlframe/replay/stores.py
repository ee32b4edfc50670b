"""Arrays with a row per slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlframe.errors import UsageError
from rlframe.replay.frames import FrameStore, looks_stacked
from rlframe.replay.layout import Leaf, TreeLayout
from rlframe.replay.memory import check_memory
from rlframe.replay.outputs import Outputs, storage
from rlframe.replay.timeline import Index, Numbers, Timeline

# (name, shape, dtype) -> an array with a row per slot
Allocate = Callable[[str, tuple[int, ...], np.dtype], np.ndarray]


def own_memory(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory of this process. Columns of scalars begin at 0, as shared memory does; larger rows hold anything."""
    return storage(shape, dtype) if len(shape) > 1 else np.zeros(shape, dtype)


class TreeStore:
    """One array for each leaf of a tree, whose rows are kept as they come."""

    def __init__(self, layout: TreeLayout, timeline: Timeline, allocate: Allocate):
        self._layout, self._timeline = layout, timeline
        self._data = [allocate(leaf.name, (timeline.slots, *leaf.shape), leaf.dtype) for leaf in layout.leaves]
        self.single = self._data[0] if layout.is_leaf else None  # the only array, where the tree is one leaf

    def write(self, index: Index, tree: Any) -> None:
        """Stores the tree of `[B, ...]` in the slots `index`."""
        if self.single is not None:
            self.single[index] = tree
            return
        for data, values in zip(self._data, self._layout.split(tree)):
            data[index] = values

    def read(self, slots: np.ndarray, outputs: Outputs) -> Any:
        """Returns the tree of the rows in `slots` (any shape; below 0 counts from the end), `[*slots.shape, ...]`."""
        if self.single is not None:
            return outputs.take(self.single, slots)
        return self._layout.build([outputs.take(data, slots) for data in self._data])

    def arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint must hold."""
        return {leaf.name: self._timeline.used(data) for leaf, data in zip(self._layout.leaves, self._data)}


class ObservationStore:
    """Observations, each once; frame-stacked pixels as single frames.

    Args:
        single_frame: True or False for every leaf; None: where one looks stacked, until its data shows that it is not.
        num_envs: environments of the first writer, which decides how far back a frame may lie.
        allocate: gives the arrays of whole rows.
    """

    def __init__(
        self, layout: TreeLayout, timeline: Timeline, single_frame: bool | None, num_envs: int, allocate: Allocate
    ):
        self._layout, self._timeline, self._forced, self._num_envs = layout, timeline, single_frame, num_envs
        rows = TreeStore(layout, timeline, allocate)
        self._rows = rows._data
        self._frames: dict[int, FrameStore] = {}
        for i, leaf in enumerate(layout.leaves):
            if stores_frames(leaf, single_frame):
                self._rows[i] = np.zeros(0, leaf.dtype)
                self._frames[i] = FrameStore(leaf, timeline, slack(leaf, num_envs))
        self.single = self._rows[0] if layout.is_leaf and not self._frames else None

    def write(self, first: int, index: Index, tree: Any, before: Numbers | None) -> None:
        """Stores the tree of `[B, ...]` for the numbers from `first`; `before`: the timesteps they follow, if any."""
        if self.single is not None:
            self.single[index] = tree
            return
        for i, values in enumerate(self._layout.split(tree)):
            store = self._frames.get(i)
            if store is None:
                self._rows[i][index] = values
            else:
                store.write(first, index, values, before)
                if store.failing:
                    self._give_up(i, store)

    def read(self, slots: np.ndarray, outputs: Outputs) -> Any:
        """Returns the tree of the observations in `slots` (any shape), `[*slots.shape, ...]`."""
        if self.single is not None:
            return outputs.take(self.single, slots)
        return self._layout.build(
            [
                self._frames[i].read(slots, outputs) if i in self._frames else outputs.take(data, slots)
                for i, data in enumerate(self._rows)
            ]
        )

    def read_both(self, slots: np.ndarray, others: np.ndarray, outputs: Outputs) -> tuple[Any, Any]:
        """Returns (`read(slots)`, `read(others)`), for `others` that share frames with `slots`."""
        if self.single is not None:
            return outputs.take(self.single, slots), outputs.take(self.single, others)
        pairs = [
            self._frames[i].read_both(slots, others, outputs)
            if i in self._frames
            else (outputs.take(data, slots), outputs.take(data, others))
            for i, data in enumerate(self._rows)
        ]
        return self._layout.build([a for a, _ in pairs]), self._layout.build([b for _, b in pairs])

    def _give_up(self, i: int, store: FrameStore) -> None:
        """Keeps whole rows from now on, as the stacks of leaf `i` do not continue each other."""
        leaf = self._layout.leaves[i]
        if self._forced:
            raise UsageError(
                f"{leaf.name}: single_frame was asked for, but in {store.rows_aside} of {store.rows_seen} observations "
                "the older frames are not those of the step before. Leave single_frame out."
            )
        slots = self._timeline.slots
        check_memory(leaf.nbytes * slots, slots, f"{leaf.name} looks like stacked frames but is none: kept whole")
        data = storage((slots, *leaf.shape), leaf.dtype)
        for low in range(0, min(slots, self._timeline.head), 256):
            part = np.arange(low, min(low + 256, slots, self._timeline.head))
            data[part] = store.read(part, Outputs())
        self._rows[i] = data
        del self._frames[i]
        self.single = data if self._layout.is_leaf else None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes when it is full."""
        return sum(
            _leaf_bytes(leaf, i in self._frames, self._timeline.slots, self._num_envs)
            for i, leaf in enumerate(self._layout.leaves)
        )

    def framed(self) -> list[str]:
        """The names of the leaves of which single frames are kept."""
        return [store.leaf.name for store in self._frames.values()]

    def restore_framed(self, names: list[str]) -> None:
        """Keeps the leaves whole that are not in `names`; only before anything was written."""
        for i, store in list(self._frames.items()):
            if store.leaf.name not in names:
                self._give_up(i, store)

    def arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint must hold, with `extra`."""
        arrays: dict[str, np.ndarray] = {}
        for i, (leaf, data) in enumerate(zip(self._layout.leaves, self._rows)):
            arrays.update(self._frames[i].arrays() if i in self._frames else {leaf.name: self._timeline.used(data)})
        return arrays

    def extra(self) -> dict[str, np.ndarray]:
        """Small arrays whose sizes vary."""
        return {
            f"{store.leaf.name} {name}": array
            for store in self._frames.values()
            for name, array in store.extra().items()
        }

    def set_extra(self, extra: dict[str, np.ndarray]) -> None:
        """The inverse of `extra`."""
        for store in self._frames.values():
            prefix = f"{store.leaf.name} "
            store.set_extra({key[len(prefix) :]: value for key, value in extra.items() if key.startswith(prefix)})


def stores_frames(leaf: Leaf, single_frame: bool | None) -> bool:
    """Whether single frames of a leaf are kept."""
    if single_frame is None:
        return looks_stacked(leaf)
    return single_frame and len(leaf.shape) == 3 and leaf.shape[0] > 1


def slack(leaf: Leaf, num_envs: int) -> int:
    """How many numbers longer than timesteps frames are kept: enough for a batch a few steps behind the others."""
    return 4 * leaf.shape[0] * num_envs


def observation_bytes(layout: TreeLayout, single_frame: bool | None, slots: int, num_envs: int) -> int:
    """Bytes that an `ObservationStore` takes when it is full."""
    return sum(_leaf_bytes(leaf, stores_frames(leaf, single_frame), slots, num_envs) for leaf in layout.leaves)


def _leaf_bytes(leaf: Leaf, framed: bool, slots: int, num_envs: int) -> int:
    if not framed:
        return leaf.nbytes * slots
    return FrameStore.bytes_needed(leaf, slots) + slack(leaf, num_envs) * (leaf.nbytes // leaf.shape[0])
