"""`Layout` converts observation trees (dict, tuple) to lists of leaves and back. `BatchBuffer` contains one batch.

The arrays that a pool returns belong to the caller while the caller refers to them. A view is also a reference, and a
JAX array is one too, because it can share NumPy's memory. For pixels, allocating new memory in each step takes longer
than copying. So the pool reuses a buffer when the reference counts show that the buffer is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from sys import getrefcount
from typing import Any

import numpy as np

from rlframe.errors import EnvError, RlframeError, UsageError
from rlframe.types import TimeStep


class Layout:
    """Converts trees with the structure of `spec` to lists of leaves in a fixed order, and back."""

    def __init__(self, spec: Any):
        self.spec = spec
        self.leaves: list[Any] = list(_leaves(spec))
        self.is_leaf = not isinstance(spec, (dict, tuple))
        parts = spec.values() if isinstance(spec, dict) else spec if isinstance(spec, tuple) else ()
        is_nested = any(isinstance(part, (dict, tuple)) for part in parts)
        self._keys = tuple(spec) if isinstance(spec, dict) and not is_nested else None
        self._is_flat_tuple = isinstance(spec, tuple) and not is_nested

    def flatten(self, tree: Any) -> list[Any]:
        """Return the leaves of a tree. Accept any Mapping instead of a dict, and a list instead of a tuple.

        Raises:
          SpecMismatchError: the structure of the tree differs from the spec. The message names the wrong part.
        """
        if self.is_leaf:
            return [tree]
        if type(tree) is dict and self._keys is not None and len(tree) == len(self._keys):
            try:  # `contextlib.suppress` would double the time of this method
                return [tree[key] for key in self._keys]
            except KeyError:
                pass
        elif type(tree) is tuple and self._is_flat_tuple and len(tree) == len(self.leaves):
            return list(tree)
        out: list[Any] = []
        _flatten(self.spec, tree, "observation", out)
        return out

    def unflatten(self, leaves: list[Any]) -> Any:
        """Return a new tree (dict, tuple) with these leaves. If the spec is a single leaf, return the leaf itself."""
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
    """An observation, or a leaf of it, is not in its space.

    Args:
      name: the path of the leaf.
      received: the wrong value, dtype, shape or structure.
      expected: a description of the values that the space allows.
      place: the indices of the wrong value; None if the dtype, shape or structure is wrong.
    """

    def __init__(self, name: str, received: str, expected: str, place: tuple[int, ...] | None = None):
        self.name, self.received, self.expected, self.place = name, received, expected, place
        super().__init__(f"{name!r} must be {expected}, got {received}{_at(place)}.")

    def for_environment(self, env_id: int) -> RlframeError:
        """Return an error with the id of the environment that returned the observation."""
        gave = f"Environment {env_id} gave {self.name!r}"
        if self.place is None:
            return UsageError(
                f"{gave} as {self.received}, but its space requires {self.expected}. Correct the environment's "
                "observation space."
            )
        return EnvError(
            f"{gave} with {self.received}{_at(self.place)}: expected {self.expected}. Correct the environment, or its "
            "observation space."
        )

    def for_batch(self, env_ids: Any) -> RlframeError:
        """Return an error for the environment with the wrong value. Row `i` of the batch has the id `env_ids[i]`."""
        if not self.place:
            return self.for_environment(env_ids[0])
        inside = SpecMismatchError(self.name, self.received, self.expected, self.place[1:])
        return inside.for_environment(env_ids[self.place[0]])


def _at(place: tuple[int, ...] | None) -> str:
    return f" at {place}" if place else ""


_MAX_BUFFERS = 8  # maximum number of buffers that a pool reuses; more buffers are allocated only for temporary use


class BatchBuffer:
    """One batch: `step_type` [B] uint8, `reward` [B] float32, `discount` [B] float32, and `leaves`, arrays [B, ...]."""

    def __init__(self, layout: Layout, arrays: list[np.ndarray]):
        self._layout = layout
        self.arrays = arrays
        self.step_type, self.reward, self.discount = arrays[:3]
        self.leaves = arrays[3:]
        self._slices: dict[tuple[int, int], BatchBuffer] = {}
        self.idle_counts: list[int] | None = None

    def copy(self) -> BatchBuffer:
        """Return a copy."""
        return BatchBuffer(self._layout, [array.copy() for array in self.arrays])

    def select(self, env_ids: np.ndarray) -> BatchBuffer:
        """Return a copy of the rows of the environments `env_ids`."""
        return BatchBuffer(self._layout, [np.take(array, env_ids, axis=0) for array in self.arrays])

    def timestep(self) -> TimeStep:
        return TimeStep(self.step_type, self.reward, self.discount, self._layout.unflatten(self.leaves))

    def rows(self, start: int, stop: int) -> BatchBuffer:
        """Return a view of the rows start .. stop - 1."""
        if (start, stop) not in self._slices:
            self._slices[start, stop] = BatchBuffer(self._layout, [array[start:stop] for array in self.arrays])
            self.idle_counts = None
        return self._slices[start, stop]

    def mark_idle(self) -> None:
        """Record the current reference counts. Call this method while only the pool refers to the arrays."""
        self.idle_counts = list(map(getrefcount, self.arrays))

    def is_idle(self) -> bool:
        return list(map(getrefcount, self.arrays)) == self.idle_counts


def buffer_shapes(layout: Layout, num_envs: int) -> list[tuple[tuple[int, ...], np.dtype]]:
    """Return (shape, dtype) of each array in `BatchBuffer.arrays`, in the same order."""
    scalars = [np.dtype(np.uint8), np.dtype(np.float32), np.dtype(np.float32)]
    return [((num_envs,), dtype) for dtype in scalars] + [
        ((num_envs, *leaf.shape), leaf.dtype) for leaf in layout.leaves
    ]


def new_buffer(layout: Layout, num_envs: int) -> BatchBuffer:
    """Allocate a buffer."""
    return BatchBuffer(layout, [np.zeros(shape, dtype) for shape, dtype in buffer_shapes(layout, num_envs)])


class BufferRing:
    """A set of buffers. `take` returns a buffer to which the caller no longer refers, or a new buffer.

    Args:
      layout: the layout of the observations.
      num_envs: number of rows.
      slices: for each worker, (start, stop) of the rows that the worker writes.
    """

    def __init__(self, layout: Layout, num_envs: int, slices: list[tuple[int, int]]):
        self._layout = layout
        self._num_envs = num_envs
        self._slices = slices
        self._buffers: list[BatchBuffer] = []
        self._next = 0

    def take(self) -> BatchBuffer:
        for _ in range(len(self._buffers)):
            self._next = (self._next + 1) % len(self._buffers)
            if self._buffers[self._next].is_idle():
                return self._buffers[self._next]
        buffer = new_buffer(self._layout, self._num_envs)
        for start, stop in self._slices:
            buffer.rows(start, stop)
        if len(self._buffers) < _MAX_BUFFERS:
            buffer.mark_idle()
            self._buffers.append(buffer)
        return buffer
