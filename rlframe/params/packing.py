"""Pack the small leaves of a tree into one array.

On a CPU, a jitted call takes 3 to 15 us for each argument and each result, even for small arrays. So the small arrays
of a policy are passed as one array. Large leaves stay separate, because it takes longer to copy than to pass them.
"""

from __future__ import annotations

import functools
import pickle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlframe.types import Tree

_LARGE = 64 * 1024  # maximum bytes of a leaf that is packed; larger leaves stay separate


class _Part(NamedTuple):
    """The part of a packed vector that contains one leaf. `start` and `stop` count elements of the vector."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: np.dtype


class Packing:
    """The layout of a packed tree. Trees with equal structure, shapes and dtypes have equal layouts.

    A layout can be pickled.

    Args:
        tree: the tree to pack. Its leaves are arrays, or any objects with `shape` and `dtype`.

    Attributes:
        template: a tree of the same structure. Its leaves are `jax.ShapeDtypeStruct` objects.
        packed_shapes: (shape, dtype) of each array that `pack_jax` returns.
    """

    def __init__(self, tree: Tree) -> None:
        self.template = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
        leaves, self._treedef = jax.tree.flatten(self.template)
        self._parts: list[_Part | None] = []  # one element for each leaf; None if the leaf is not packed
        self._size = 0
        for leaf in leaves:
            shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
            size = int(np.prod(shape))
            if dtype.itemsize != 4 or size * 4 > _LARGE:
                self._parts.append(None)
                continue
            self._parts.append(_Part(self._size, self._size + size, shape, dtype))
            self._size += size
        others = [leaf for leaf, part in zip(leaves, self._parts, strict=True) if part is None]
        self.packed_shapes = [((self._size,), np.dtype(np.int32))]
        self.packed_shapes += [(tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in others]

    def __reduce__(self) -> tuple[Any, ...]:
        return _packing_of, (self.pickled,)

    @functools.cached_property
    def pickled(self) -> bytes:
        """The pickled template."""
        return pickle.dumps(self.template)

    def __eq__(self, other: object) -> bool:
        if other is self or not isinstance(other, Packing):
            return other is self
        same = other._treedef == self._treedef and other._parts == self._parts
        return same and other.packed_shapes == self.packed_shapes

    def pack_jax(self, tree: Tree) -> list[jax.Array]:
        """Return [one int32 vector with the small leaves, *the other leaves]. For jitted functions."""
        leaves = jax.tree.leaves(tree)
        small = [
            jax.lax.bitcast_convert_type(leaf, jnp.int32).ravel()
            for leaf, part in zip(leaves, self._parts, strict=True)
            if part is not None
        ]
        vector = jnp.concatenate(small) if small else jnp.zeros((0,), jnp.int32)
        return [vector, *(leaf for leaf, part in zip(leaves, self._parts, strict=True) if part is None)]

    def floats(self, packed: list[jax.Array]) -> list[jax.Array]:
        """Return arrays with all floating-point numbers of a packed tree. For jitted functions.

        The number of arrays is small, because neighboring small leaves become one array.
        """
        ranges: list[tuple[int, int]] = []
        for start, stop, _, dtype in filter(None, self._parts):
            if dtype == np.float32 and ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            elif dtype == np.float32:
                ranges.append((start, stop))
        vector, *others = packed
        small = [jax.lax.bitcast_convert_type(vector[start:stop], jnp.float32) for start, stop in ranges]
        return [*small, *(leaf for leaf in others if jnp.issubdtype(leaf.dtype, jnp.inexact))]

    def unpack_jax(self, packed: list[Any]) -> Tree:
        """Return the tree that `pack_jax` packed. For jitted functions."""
        vector, *others = packed
        rest = iter(others)
        leaves = [
            jax.lax.bitcast_convert_type(vector[part.start : part.stop], part.dtype).reshape(part.shape)
            if part
            else next(rest)
            for part in self._parts
        ]
        return jax.tree.unflatten(self._treedef, leaves)

    def pack_numpy(self, tree: Tree) -> list[np.ndarray]:
        """Pack a tree of numpy arrays. The result has the same layout as the result of `pack_jax`."""
        vector = np.empty(self._size, np.int32)
        others = []
        for leaf, part in zip(jax.tree.leaves(tree), self._parts, strict=True):
            if part is None:
                others.append(leaf)
            else:
                vector[part.start : part.stop] = leaf.reshape(-1).view(np.int32)
        return [vector, *others]

    def unpack_numpy(self, packed: list[Any]) -> Tree:
        """Return the tree as numpy arrays.

        Small leaves are writable views of one new array. Large leaves may be read-only.
        """
        vector = _fetch(packed[0]).copy()  # copy, because environments refuse read-only actions
        rest = (np.asarray(array) for array in packed[1:])
        leaves = [
            np.ndarray(part.shape, part.dtype, vector, 4 * part.start) if part else next(rest) for part in self._parts
        ]
        return self._treedef.unflatten(leaves)


class ByteLayout:
    """The layout of a tree in one array of bytes, so that a single copy brings the tree to a device.

    Args:
        tree: a tree of numpy arrays. The layout is valid for trees of the same structure, shapes and dtypes.

    Attributes:
        size: number of bytes.
    """

    def __init__(self, tree: Tree) -> None:
        leaves, self._treedef = jax.tree.flatten(tree)
        self._parts: list[_Part] = []
        self.size = 0
        for leaf in map(np.asarray, leaves):
            dtype = np.dtype(jax.dtypes.canonicalize_dtype(leaf.dtype))
            start = -(-self.size // 8) * 8  # aligned for every dtype
            self.size = start + leaf.size * dtype.itemsize
            self._parts.append(_Part(start, self.size, leaf.shape, dtype))

    def pack(self, tree: Tree) -> np.ndarray:
        """Return a new array [size] uint8."""
        packed = np.empty(self.size, np.uint8)
        for leaf, part in zip(jax.tree.leaves(tree), self._parts, strict=True):
            packed[part.start : part.stop].view(part.dtype).reshape(part.shape)[...] = leaf
        return packed

    def unpack_jax(self, packed: jax.Array) -> Tree:
        """Return the tree that `pack` packed. For jitted functions."""
        return self._treedef.unflatten([_from_bytes(packed[part.start : part.stop], part) for part in self._parts])


def _from_bytes(raw: jax.Array, part: _Part) -> jax.Array:
    if part.dtype == np.bool_:
        return (raw != 0).reshape(part.shape)
    if part.dtype.itemsize > 1:
        raw = raw.reshape(-1, part.dtype.itemsize)
    return jax.lax.bitcast_convert_type(raw, part.dtype).reshape(part.shape)


class PackedParams:
    """One packed version of the parameters. A learner publishes it, and an inferencer uploads it without change.

    A pickle contains numpy arrays. A device array is fetched only once, even if it is pickled several times.

    Args:
        packing: the layout of the packed tree.
        arrays: the result of `Packing.pack_jax`. Do not write to them.
    """

    __slots__ = ("arrays", "packing")

    def __init__(self, packing: Packing, arrays: list[Any]) -> None:
        self.packing, self.arrays = packing, arrays

    @classmethod
    def of(cls, tree: Tree) -> PackedParams:
        """Return the packed form of a tree of arrays."""
        tree = jax.tree.map(np.asarray, tree)
        packing = Packing(tree)
        return cls(packing, packing.pack_numpy(tree))

    def unpack_numpy(self) -> Tree:
        """Return the parameters as a tree of numpy arrays."""
        return self.packing.unpack_numpy(self.arrays)

    def __reduce__(self) -> tuple[Any, ...]:
        # Send only bytes and arrays, because Courier cannot send the template's objects.
        return _params_of, (self.packing.pickled, [np.asarray(array) for array in self.arrays])


def _params_of(pickled: bytes, arrays: list[np.ndarray]) -> PackedParams:
    return PackedParams(_packing_of(pickled), arrays)


def _packing_of(pickled: bytes) -> Packing:
    # Pickles refer to this function, because Launchpad changes how cached functions are pickled.
    return _load_packing(pickled)


@functools.lru_cache(maxsize=8)
def _load_packing(pickled: bytes) -> Packing:
    return Packing(pickle.loads(pickled))


def _fetch(vector: Any) -> np.ndarray:
    # Use the buffer protocol for arrays on the CPU, because np.asarray takes 3 us longer.
    try:
        return np.frombuffer(vector, np.int32)
    except (BufferError, TypeError, ValueError):
        return np.asarray(vector)
