"""Arrays that hold one batch of timesteps, recycled as soon as nobody uses them any more.

What a pool returns belongs to the caller for as long as the caller (or a view of it, or JAX, which may
alias numpy memory) keeps it. Allocating pixels anew for each step costs more than copying them, so a frame
is written again once its reference counts say that it is free.
"""

from __future__ import annotations

from sys import getrefcount

import numpy as np

from rlframe.envs.layout import Layout
from rlframe.types import TimeStep

_KEPT = 8  # frames that a pool keeps for re-use; a caller who holds more gets fresh ones


class Frame:
    """One batch: `step_type` [B] uint8, `reward` [B] float32, `discount` [B] float32, `leaves` [B, ...] each."""

    def __init__(self, layout: Layout, arrays: list[np.ndarray]):
        self._layout = layout
        self.arrays = arrays
        self.step_type, self.reward, self.discount = arrays[:3]
        self.leaves = arrays[3:]
        self._slices: dict[tuple[int, int], Frame] = {}
        self.idle_counts: list[int] | None = None

    def copy(self) -> Frame:
        """The same values in memory of their own."""
        return Frame(self._layout, [array.copy() for array in self.arrays])

    def select(self, env_ids: np.ndarray) -> Frame:
        """The rows of some environments, in memory of their own."""
        return Frame(self._layout, [np.take(array, env_ids, axis=0) for array in self.arrays])

    def timestep(self) -> TimeStep:
        return TimeStep(self.step_type, self.reward, self.discount, self._layout.unflatten(self.leaves))

    def rows(self, start: int, stop: int) -> Frame:
        """The part that the environments start .. stop write, as views."""
        if (start, stop) not in self._slices:
            self._slices[start, stop] = Frame(self._layout, [array[start:stop] for array in self.arrays])
            self.idle_counts = None
        return self._slices[start, stop]

    def mark_idle(self) -> None:
        """Remembers the reference counts that mean "only the pool itself"; call it while that is so."""
        self.idle_counts = [getrefcount(array) for array in self.arrays]

    def is_idle(self) -> bool:
        return [getrefcount(array) for array in self.arrays] == self.idle_counts


def frame_shapes(layout: Layout, num_envs: int) -> list[tuple[tuple[int, ...], np.dtype]]:
    """(shape, dtype) of each array of a frame, in order."""
    scalars = [np.dtype(np.uint8), np.dtype(np.float32), np.dtype(np.float32)]
    return [((num_envs,), dtype) for dtype in scalars] + [
        ((num_envs, *leaf.shape), leaf.dtype) for leaf in layout.leaves
    ]


def new_frame(layout: Layout, num_envs: int) -> Frame:
    """A frame in memory of its own."""
    return Frame(layout, [np.zeros(shape, dtype) for shape, dtype in frame_shapes(layout, num_envs)])


class FrameRing:
    """Gives out a frame that nobody else holds. `groups` are the (start, stop) slices that will be written."""

    def __init__(self, layout: Layout, num_envs: int, groups: list[tuple[int, int]]):
        self._layout = layout
        self._num_envs = num_envs
        self._groups = groups
        self._frames: list[Frame] = []
        self._next = 0

    def take(self) -> Frame:
        for _ in range(len(self._frames)):
            self._next = (self._next + 1) % len(self._frames)
            if self._frames[self._next].is_idle():
                return self._frames[self._next]
        frame = new_frame(self._layout, self._num_envs)
        for start, stop in self._groups:
            frame.rows(start, stop)
        if len(self._frames) < _KEPT:
            frame.mark_idle()
            self._frames.append(frame)
        return frame
