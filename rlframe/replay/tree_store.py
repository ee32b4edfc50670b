"""Arrays with one row per slot, and checks that the arrays fit into the available memory."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil

from rlframe.errors import UsageError
from rlframe.replay.frames import FrameStore, looks_stacked
from rlframe.replay.layout import Allocate, Leaf, OutputArrays, TreeLayout, process_memory
from rlframe.replay.timeline import Index, Numbers, Timeline

_CGROUPS = pathlib.Path("/sys/fs/cgroup")
_PROCESS_CGROUPS = pathlib.Path("/proc/self/cgroup")
# For cgroups v2 and v1: (file of the limit, file of the usage, key in memory.stat). The key's value is the number of
# used bytes that the kernel can release.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class TreeStore:
    """Stores trees of arrays with one row per slot. Frame-stacked pixels are stored as single frames.

    Args:
        layout: the layout of the tree.
        timeline: the timesteps and their slots.
        allocate: function that returns the arrays.
        single_frame: True stores frame-stacked leaves as single frames. None detects stacked frames by the shape and
            dtype of a leaf. If the data of such a leaf is not stacked, whole rows are stored.
        num_envs: number of environments of the first writer. It determines the maximum distance to an older frame.

    Attributes:
        only_array: the array, if the tree is one leaf with whole rows. None for other trees.
    """

    def __init__(
        self,
        layout: TreeLayout,
        timeline: Timeline,
        allocate: Allocate,
        single_frame: bool | None = False,
        num_envs: int = 1,
    ):
        self._layout, self._timeline, self._forced = layout, timeline, single_frame
        self._rows: list[np.ndarray] = []
        self._frames: dict[int, FrameStore] = {}
        for i, leaf in enumerate(layout.leaves):
            if _stores_frames(leaf, single_frame):
                self._rows.append(np.zeros(0, leaf.dtype))
                # Enough slots if some environments are a few steps late. More writers can come later, and then the
                # timesteps of one environment are farther apart.
                slack = max(4 * leaf.shape[0] * num_envs, timeline.slots // 64)
                self._frames[i] = FrameStore(leaf, timeline, slack, allocate)
            else:
                self._rows.append(allocate(leaf.name, (timeline.slots, *leaf.shape), leaf.dtype))
        self.only_array = self._rows[0] if layout.is_leaf and not self._frames else None

    def write(self, index: Index, tree: Any, first: int = 0, before: Numbers | None = None) -> None:
        """Store the tree of `[B, ...]` in the slots `index`.

        `first` and `before` are needed for single frames. `first` is the number of the first timestep. `before` are the
        numbers of the environments' previous timesteps, or None if there are no previous timesteps.
        """
        if self.only_array is not None:
            self.only_array[index] = tree
            return
        for i, values in enumerate(self._layout.split(tree)):
            store = self._frames.get(i)
            if store is None:
                self._rows[i][index] = values
            else:
                store.write(first, index, values, before)
                if store.is_wasteful:
                    self._store_whole_rows(i, store)

    def read(self, slots: np.ndarray, outputs: OutputArrays) -> Any:
        """Return the tree of the rows in `slots`. `slots` can have any shape. Leaves are `[*slots.shape, ...]`."""
        if self.only_array is not None:
            return outputs.take(self.only_array, slots)
        return self._layout.build(
            [
                self._frames[i].read(slots, outputs) if i in self._frames else outputs.take(data, slots)
                for i, data in enumerate(self._rows)
            ]
        )

    def read_both(self, slots: np.ndarray, others: np.ndarray, outputs: OutputArrays) -> tuple[Any, Any]:
        """Return (`read(slots)`, `read(others)`). This is faster if `slots` and `others` share frames."""
        if self.only_array is not None:
            return outputs.take(self.only_array, slots), outputs.take(self.only_array, others)
        pairs = [
            self._frames[i].read_both(slots, others, outputs)
            if i in self._frames
            else (outputs.take(data, slots), outputs.take(data, others))
            for i, data in enumerate(self._rows)
        ]
        return self._layout.build([a for a, _ in pairs]), self._layout.build([b for _, b in pairs])

    def _store_whole_rows(self, i: int, store: FrameStore) -> None:
        """Convert leaf `i` to whole rows, because its stacks do not repeat the frames of the previous stacks."""
        leaf = self._layout.leaves[i]
        if self._forced:
            raise UsageError(
                f"{leaf.name}: single_frame=True needs frame-stacked observations, but in "
                f"{store.rows_stored_separately} of {store.rows_seen} observations the older frames differ "
                "from the previous step's frames. Leave single_frame out."
            )
        slots = self._timeline.slots
        check_memory(
            leaf.nbytes * slots, slots, f"few stacks of {leaf.name} repeat earlier frames: whole rows are stored"
        )
        data = process_memory(leaf.name, (slots, *leaf.shape), leaf.dtype)
        for low in range(0, min(slots, self._timeline.head), 256):
            part = np.arange(low, min(low + 256, slots, self._timeline.head))
            data[part] = store.read(part, OutputArrays())
        self._rows[i] = data
        del self._frames[i]
        self.only_array = data if self._layout.is_leaf else None

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(data.nbytes for data in self._rows) + sum(store.nbytes for store in self._frames.values())

    def single_frame_leaves(self) -> list[str]:
        """Return the names of the leaves that are stored as single frames."""
        return [store.leaf.name for store in self._frames.values()]

    def restore_single_frame_leaves(self, names: list[str]) -> None:
        """Store the leaves that are not in `names` as whole rows. Call this method before the first write."""
        for i, store in list(self._frames.items()):
            if store.leaf.name not in names:
                self._store_whole_rows(i, store)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that a checkpoint must contain, in addition to `variable_arrays`."""
        arrays: dict[str, np.ndarray] = {}
        for i, (leaf, data) in enumerate(zip(self._layout.leaves, self._rows)):
            arrays.update(self._frames[i].arrays() if i in self._frames else {leaf.name: self._timeline.used(data)})
        return arrays

    def variable_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of variable size that a checkpoint must contain. They are small."""
        return {
            f"{store.leaf.name} {name}": array
            for store in self._frames.values()
            for name, array in store.variable_arrays().items()
        }

    def set_variable_arrays(self, variable_arrays: dict[str, np.ndarray]) -> None:
        """Restore the arrays that `variable_arrays` returned."""
        for store in self._frames.values():
            prefix = f"{store.leaf.name} "
            store.set_variable_arrays(
                {key[len(prefix) :]: value for key, value in variable_arrays.items() if key.startswith(prefix)}
            )


def _stores_frames(leaf: Leaf, single_frame: bool | None) -> bool:
    """Return True if the leaf is stored as single frames."""
    if single_frame is None:
        return looks_stacked(leaf)
    return single_frame and len(leaf.shape) == 3 and leaf.shape[0] > 1


def check_memory(needed: int, capacity: int, what: str) -> None:
    """Raise `UsageError` if `needed` bytes for `capacity` steps exceed the available memory.

    The system reserves memory only when data is written. Without this check, memory would run out later.
    """
    available = available_memory()
    if needed > available:
        fits = int(capacity * (available / needed) * 0.9)
        raise UsageError(
            f"The replay buffer needs {_gigabytes(needed)} for {capacity} steps ({what}), but only "
            f"{_gigabytes(available)} of memory is available. A capacity of {fits} steps would fit."
        )


def available_memory() -> int:
    """Return the number of bytes that this process can allocate without swapping, within its container's limit."""
    containers = [left for directory in _cgroups() if (left := _available_in(directory)) is not None]
    return max(0, min([psutil.virtual_memory().available, *containers]))


def _cgroups() -> Iterator[pathlib.Path]:
    """Yield the directories of this process's memory cgroup and of all its parent cgroups."""
    try:
        lines = _PROCESS_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:  # cgroups v2 has lines like `0::/path`; v1 has lines like `4:memory:/path`
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS / "memory" if controllers else _CGROUPS
        own = root / path.lstrip("/")
        yield from (directory for directory in (own, *own.parents) if directory.is_relative_to(root))


def _available_in(cgroup: pathlib.Path) -> int | None:
    for limit_file, usage_file, cache in _CGROUP_FILES:
        try:
            limit, usage = (cgroup / limit_file).read_text().strip(), int((cgroup / usage_file).read_text())
            statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit == "max":
            return None
        return int(limit) - usage + int(statistics.get(cache, 0))
    return None


def _gigabytes(n: int) -> str:
    return f"{n / 1e9:.2f} GB ({n} bytes)"
