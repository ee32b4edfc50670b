"""Storage of frame-stacked pixels. It stores one frame per step instead of a whole stack.

A stack `[k, H, W]` usually repeats the k - 1 newest frames of the previous stack. In this case, only the newest frame
of the stack is stored. The store first compares the k - 1 older frames with the previous stack. If they differ, as in
the first stack of an episode, the older frames are stored separately. So any kind of stack is read without change.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlframe.replay.layout import Allocate, Leaf, OutputArrays
from rlframe.replay.timeline import Index, Numbers, Timeline, ring_index

_ROWS_AT_ONCE = 16  # rows per read, so that their frames fit into the second-level cache
_MIN_ROWS = 256  # rows that are stored before the store checks whether it saves memory


def looks_stacked(leaf: Leaf) -> bool:
    """Return True if a leaf has the shape and dtype of stacked frames.

    Later, the data of the leaf can show that the frames are not stacked.
    """
    return leaf.dtype == np.uint8 and len(leaf.shape) == 3 and 2 <= leaf.shape[0] <= 8 and min(leaf.shape[1:]) >= 32


class FrameStore:
    """Stores stacks of k frames, but stores each frame only once.

    A stack is stored as k references to frames. A reference is the number of the timestep that has the frame as its
    newest frame, or -1 - i for the separate frame i. After a timestep is overwritten, its frame is kept for `slack`
    more timesteps. If a stack needs an older frame, this frame is stored separately.
    """

    def __init__(self, leaf: Leaf, timeline: Timeline, slack: int, allocate: Allocate):
        self.leaf, self._timeline, self._slack = leaf, timeline, slack
        self._k = leaf.shape[0]
        self._rows = timeline.slots + slack
        self._frames = allocate(f"{leaf.name} frames", (self._rows, *leaf.shape[1:]), leaf.dtype)
        self._references = allocate(f"{leaf.name} references", (timeline.slots, self._k), np.dtype(np.int64))
        self._separate_frames = {0: np.zeros(leaf.shape[1:], leaf.dtype)}  # frame 0 is black
        self._next_separate, self._sweep_at = 1, 1024
        self.rows_seen = self.rows_stored_separately = 0

    @property
    def nbytes(self) -> int:
        """Size in bytes of the full store, and of the frames that are stored separately now."""
        separate = len(self._separate_frames) * self._separate_frames[0].nbytes
        return self._frames.nbytes + self._references.nbytes + separate

    @property
    def is_wasteful(self) -> bool:
        """True if storing whole stacks would need less memory, because few stacks repeat earlier frames."""
        return self.rows_seen >= _MIN_ROWS and self.rows_stored_separately > self.rows_seen // 2

    def write(self, first: int, index: Index, values: Any, before: Numbers | None) -> None:
        """Store stacks.

        Args:
            first: number of the first timestep. The numbers of the next timesteps are consecutive.
            index: slots of the stacks.
            values: the stacks [B, k, H, W].
            before: numbers of the previous timesteps of the same environments. None if these do not exist.
        """
        if len(self._separate_frames) >= self._sweep_at:
            self._sweep()
        values = np.asarray(values)
        count = len(values)
        self._frames[ring_index(first, count, self._rows)] = values[:, -1]
        references = np.empty((count, self._k), np.int64)
        references[:, -1] = np.arange(first, first + count)
        if before is None:
            differ: np.ndarray | None = np.ones(count, bool)
        else:
            references[:, :-1] = self._references[self._timeline.index(before, count), 1:]
            differ = self._differ(references[:, :-1], values, first)
        if differ is not None:
            for row in differ.nonzero()[0]:
                references[row] = self._store_separately(values[row], first + int(row))
            self.rows_stored_separately += int(np.count_nonzero(differ))
        self.rows_seen += count
        self._references[index] = references

    def _differ(self, references: np.ndarray, values: np.ndarray, first: int) -> np.ndarray | None:
        """Compare the older frames with the frames that are referenced.

        Return an array [B] bool, which is True for a row whose frames differ, or are too old. Return None if no row
        is True.
        """
        count = len(values)
        lowest = references[0]
        # Do not refer to frames before this number, because they are overwritten too early.
        youngest = max(0, first + count - self._slack)
        in_blocks = lowest.min() >= youngest and (references == lowest + np.arange(count)[:, None]).all()
        if in_blocks:
            same = np.ones(count, bool)
            for j in range(self._k - 1):
                stored = self._frames[ring_index(int(lowest[j]), count, self._rows)]
                same &= _as_strings(values[:, j]) == _as_strings(stored)
            return None if same.all() else ~same
        stored = self._frames.take(references % self._rows, axis=0)
        self._patch(stored, references)
        differ = (stored != values[:, :-1]).any(axis=(1, 2, 3))
        differ |= ((references >= 0) & (references < youngest)).any(axis=1)
        return differ if differ.any() else None

    def _store_separately(self, stack: np.ndarray, number: int) -> list[int]:
        """Store the older frames of `stack` separately. Store equal adjacent frames once. Return the references."""
        references = [number]
        for j in range(self._k - 2, -1, -1):
            if np.array_equal(stack[j], stack[j + 1]):
                references.append(references[-1])
            elif not stack[j].any():
                references.append(-1)
            else:
                self._separate_frames[self._next_separate] = stack[j].copy()
                references.append(-1 - self._next_separate)
                self._next_separate += 1
        return references[::-1]

    def _sweep(self) -> None:
        """Remove the separate frames that no slot refers to."""
        references = self._timeline.used(self._references)
        used = set((-1 - references[references < 0]).tolist())
        self._separate_frames = {i: frame for i, frame in self._separate_frames.items() if i in used or i == 0}
        self._sweep_at = max(1024, 2 * len(self._separate_frames))

    def read(self, slots: np.ndarray, outputs: OutputArrays) -> np.ndarray:
        """Return the stacks in the slots, as an array [*slots.shape, k, H, W]."""
        references = self._references.take(slots, axis=0, mode="wrap")
        out = outputs.take(self._frames, references % self._rows)
        self._patch(out, references)
        return out

    def read_both(self, slots: np.ndarray, others: np.ndarray, outputs: OutputArrays) -> tuple[np.ndarray, np.ndarray]:
        """Return (`read(slots)`, `read(others)`) for [B] slots.

        The two reads share most frames. Read few rows at a time, so that the frames stay in the processor's cache.
        """
        references = [self._references.take(index, axis=0, mode="wrap") for index in (slots, others)]
        positions = [numbers % self._rows for numbers in references]
        shape = (len(slots), *self.leaf.shape)
        a = outputs.empty(shape, self.leaf.dtype)
        b = outputs.empty(shape, self.leaf.dtype)
        for low in range(0, len(slots), _ROWS_AT_ONCE):
            rows = slice(low, low + _ROWS_AT_ONCE)
            self._frames.take(positions[0][rows], axis=0, mode="wrap", out=a[rows])
            self._frames.take(positions[1][rows], axis=0, mode="wrap", out=b[rows])
        self._patch(a, references[0])
        self._patch(b, references[1])
        return a, b

    def _patch(self, out: np.ndarray, references: np.ndarray) -> None:
        """Copy the frames that are stored separately to their places in `out`."""
        if references.size and references.min() < 0:
            for place in zip(*(references < 0).nonzero()):
                out[place] = self._separate_frames[-1 - int(references[place])]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that a checkpoint must contain, in addition to `variable_arrays`."""
        name, used = self.leaf.name, self._timeline.used
        return {f"{name} frames": used(self._frames), f"{name} references": used(self._references)}

    def variable_arrays(self) -> dict[str, np.ndarray]:
        """Return the separate frames and the counters, which are small arrays whose sizes vary."""
        ids = np.array(list(self._separate_frames), np.int64)
        frames = np.stack(list(self._separate_frames.values()))
        counters = np.array([self._next_separate, self._sweep_at, self.rows_seen, self.rows_stored_separately])
        return {"ids": ids, "frames": frames, "counters": counters}

    def set_variable_arrays(self, variable_arrays: dict[str, np.ndarray]) -> None:
        """Restore the arrays that `variable_arrays` returned."""
        self._separate_frames = dict(zip(variable_arrays["ids"].tolist(), variable_arrays["frames"]))
        self._next_separate, self._sweep_at, self.rows_seen, self.rows_stored_separately = variable_arrays[
            "counters"
        ].tolist()


def _as_strings(frames: np.ndarray) -> np.ndarray:
    """Return bytes [B, H, W] as strings [B], because NumPy compares strings twice as fast as numbers."""
    rows = frames.reshape(len(frames), -1)
    return rows.view(f"S{rows.shape[1]}")[:, 0]
