"""Observation trees (dict, tuple) as lists of leaves in a fixed order, and the arrays that hold a batch of them.

What a pool returns belongs to the caller for as long as the caller (or a view of it, or JAX, which may alias numpy
memory) keeps it. Allocating pixels anew for each step costs more than copying them, so a frame is written again once
its reference counts show that it is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from sys import getrefcount
from typing import Any

import numpy as np

from rlframe.errors import EnvError, RlframeError, UsageError
from rlframe.types import TimeStep


class Layout:
    """The leaves of a spec tree in a fixed order, to go from trees to lists of arrays and back."""

    def __init__(self, spec: Any):
        self.spec = spec
        self.leaves: list[Any] = list(_leaves(spec))
        self.is_leaf = not isinstance(spec, (dict, tuple))
        parts = spec.values() if isinstance(spec, dict) else spec if isinstance(spec, tuple) else ()
        is_nested = any(isinstance(part, (dict, tuple)) for part in parts)
        self._keys = tuple(spec) if isinstance(spec, dict) and not is_nested else None
        self._is_flat_tuple = isinstance(spec, tuple) and not is_nested

    def flatten(self, tree: Any) -> list[Any]:
        """The leaves of a tree of this structure: any Mapping stands for a dict, a list for a tuple.

        Raises SpecMismatchError, which names the part that has another structure.
        """
        if self.is_leaf:
            return [tree]
        if type(tree) is dict and self._keys is not None and len(tree) == len(self._keys):
            try:  # `contextlib.suppress` would take as long as all the rest
                return [tree[key] for key in self._keys]
            except KeyError:
                pass
        elif type(tree) is tuple and self._is_flat_tuple and len(tree) == len(self.leaves):
            return list(tree)
        out: list[Any] = []
        _flatten(self.spec, tree, "observation", out)
        return out

    def unflatten(self, leaves: list[Any]) -> Any:
        """The inverse of `flatten`: a new dict or tuple, or the only leaf itself."""
        return leaves[0] if self.is_leaf else _unflatten(self.spec, iter(leaves))


def _leaves(spec: Any) -> Any:
    if isinstance(spec, dict):
        for sub in spec.values():
            yield from _leaves(sub)
    elif isinstance(spec, tuple):
        for sub in spec:
            yield from _leaves(sub)
    else:
        yield spec


def _flatten(spec: Any, tree: Any, path: str, out: list[Any]) -> None:
    if isinstance(spec, dict):
        if not isinstance(tree, Mapping) or len(tree) != len(spec) or not all(key in tree for key in spec):
            received = f"a dict with the keys {_keys(tree)}" if isinstance(tree, Mapping) else type(tree).__name__
            raise SpecMismatchError(path, received, f"a dict with the keys {_keys(spec)}")
        for key, sub in spec.items():
            _flatten(sub, tree[key], f"{path}.{key}", out)
    elif isinstance(spec, tuple):
        if not isinstance(tree, (tuple, list)) or len(tree) != len(spec):
            received = (
                f"{type(tree).__name__} of {len(tree)}" if isinstance(tree, (tuple, list)) else type(tree).__name__
            )
            raise SpecMismatchError(path, received, f"a tuple of {len(spec)}")
        for i, sub in enumerate(spec):
            _flatten(sub, tree[i], f"{path}.{i}", out)
    else:
        out.append(tree)


def _keys(tree: Mapping[Any, Any]) -> list[str]:
    return sorted(map(str, tree))


def _unflatten(spec: Any, leaves: Any) -> Any:
    if isinstance(spec, dict):
        return {key: _unflatten(sub, leaves) for key, sub in spec.items()}
    if isinstance(spec, tuple):
        return tuple(_unflatten(sub, leaves) for sub in spec)
    return next(leaves)


class SpecMismatchError(UsageError):
    """An observation, or a part of one, that is not in its space.

    Args:
      name: of the part.
      came: the value; or its dtype and shape, or its structure, where these are wrong.
      expected: what the space allows.
      place: the indices of a value that is not allowed; None where dtype, shape or structure are wrong.
    """

    def __init__(self, name: str, received: str, expected: str, place: tuple[int, ...] | None = None):
        self.name, self.received, self.expected, self.place = name, received, expected, place
        super().__init__(f"{name!r} must be {expected}, got {received}{_at(place)}.")

    def for_environment(self, env_id: int) -> RlframeError:
        """The same, naming the environment that gave the observation."""
        gave = f"Environment {env_id} gave {self.name!r}"
        if self.place is None:
            return UsageError(
                f"{gave} as {self.received}, but its space says {self.expected}. Correct the environment's observation "
                "space."
            )
        return EnvError(
            f"{gave} with {self.received}{_at(self.place)}: expected {self.expected}. Correct the environment, or its "
            "observation space."
        )

    def for_batch(self, env_ids: Any) -> RlframeError:
        """The same, where the observations of the environments `env_ids` were encoded as one batch."""
        if not self.place:
            return self.for_environment(env_ids[0])
        inside = SpecMismatchError(self.name, self.received, self.expected, self.place[1:])
        return inside.for_environment(env_ids[self.place[0]])


def _at(place: tuple[int, ...] | None) -> str:
    return f" at {place}" if place else ""


_KEPT = 8  # frames that a pool keeps for re-use; a caller who holds more gets fresh ones


class BatchBuffer:
    """One batch: `step_type` [B] uint8, `reward` [B] float32, `discount` [B] float32, `leaves` [B, ...] each."""

    def __init__(self, layout: Layout, arrays: list[np.ndarray]):
        self._layout = layout
        self.arrays = arrays
        self.step_type, self.reward, self.discount = arrays[:3]
        self.leaves = arrays[3:]
        self._slices: dict[tuple[int, int], BatchBuffer] = {}
        self.idle_counts: list[int] | None = None

    def copy(self) -> BatchBuffer:
        """The same values in memory of their own."""
        return BatchBuffer(self._layout, [array.copy() for array in self.arrays])

    def select(self, env_ids: np.ndarray) -> BatchBuffer:
        """The rows of some environments, in memory of their own."""
        return BatchBuffer(self._layout, [np.take(array, env_ids, axis=0) for array in self.arrays])

    def timestep(self) -> TimeStep:
        return TimeStep(self.step_type, self.reward, self.discount, self._layout.unflatten(self.leaves))

    def rows(self, start: int, stop: int) -> BatchBuffer:
        """The part that the environments start .. stop write, as views."""
        if (start, stop) not in self._slices:
            self._slices[start, stop] = BatchBuffer(self._layout, [array[start:stop] for array in self.arrays])
            self.idle_counts = None
        return self._slices[start, stop]

    def mark_idle(self) -> None:
        """Remembers the reference counts that mean "only the pool itself"; call it while that is so."""
        self.idle_counts = [getrefcount(array) for array in self.arrays]

    def is_idle(self) -> bool:
        return [getrefcount(array) for array in self.arrays] == self.idle_counts


def buffer_shapes(layout: Layout, num_envs: int) -> list[tuple[tuple[int, ...], np.dtype]]:
    """(shape, dtype) of each array of a frame, in order."""
    scalars = [np.dtype(np.uint8), np.dtype(np.float32), np.dtype(np.float32)]
    return [((num_envs,), dtype) for dtype in scalars] + [
        ((num_envs, *leaf.shape), leaf.dtype) for leaf in layout.leaves
    ]


def new_buffer(layout: Layout, num_envs: int) -> BatchBuffer:
    """A frame in memory of its own."""
    return BatchBuffer(layout, [np.zeros(shape, dtype) for shape, dtype in buffer_shapes(layout, num_envs)])


class BufferRing:
    """Gives out a frame that nobody else holds. `groups` are the (start, stop) slices that will be written."""

    def __init__(self, layout: Layout, num_envs: int, groups: list[tuple[int, int]]):
        self._layout = layout
        self._num_envs = num_envs
        self._groups = groups
        self._frames: list[BatchBuffer] = []
        self._next = 0

    def take(self) -> BatchBuffer:
        for _ in range(len(self._frames)):
            self._next = (self._next + 1) % len(self._frames)
            if self._frames[self._next].is_idle():
                return self._frames[self._next]
        frame = new_buffer(self._layout, self._num_envs)
        for start, stop in self._groups:
            frame.rows(start, stop)
        if len(self._frames) < _KEPT:
            frame.mark_idle()
            self._frames.append(frame)
        return frame
