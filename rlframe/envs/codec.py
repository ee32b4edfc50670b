"""The codec: the values of one environment in the framework's types, and actions in the environment's.

Every pool, `TrainedPolicy.act`, `evaluate`, `export` and `EnvServer` use it, and each checkpoint of a run holds it.

Observations: float64 becomes float32 and int64 becomes int32 (JAX's own default widths); categories count from 0.
Actions: the reverse, and clipped to the environment's bounds. A value that does not fit is refused by name.

`ObservationRows` encodes the observations of many environments into the arrays of a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dm_env import specs

from rlframe.envs.layout import Layout, SpecMismatchError
from rlframe.types import MultiDiscreteArray, Tree

# All terms of a sum of squares below this fit float32. The sum takes a fifth of the time of comparing each term.
FLOAT32_MAX_SQUARED = float(np.finfo(np.float32).max) ** 2

# Kinds of dtypes that are taken as another kind, if each value fits: never a float as an integer.
_ACCEPTED_KINDS = {"b": "b", "i": "iub", "u": "iub", "f": "fiub"}

_DTYPES = [np.dtype(char) for char in "?bhilqBHILQefd"]
NUMBER_TYPES = frozenset(dtype.type for dtype in _DTYPES)  # of numpy's own numbers


class ObservationLeaf:
    """How one array of an observation is encoded.

    Args:
      spec: the array in the framework's types.
      start: the environment's value of each first category; 0 for other arrays.

    Attributes:
      is_plain: an array of the spec's shape and dtype is taken as it is.
      taken: dtypes whose values fit, whatever they are. Of categories: dtypes whose values fit int64.
      wide: the dtype to collect values in that may not fit, before a batch of them is checked.
    """

    def __init__(self, spec: specs.Array, start: Any = 0):
        self.spec, self.start = spec, start
        self.is_plain = not isinstance(spec, (specs.DiscreteArray, MultiDiscreteArray))
        self._shape, self._dtype = spec.shape, spec.dtype
        self.wide = np.dtype(np.float64 if self._dtype.kind == "f" else np.int64)
        self.taken = frozenset(filter(self._accepts, _DTYPES))
        self.first = np.asarray(start, np.int64)
        self.num_values = np.asarray(getattr(spec, "num_values", 0), np.uint64)  # of categories
        self._first, self._num_values = (int(one) if one.ndim == 0 else 0 for one in (self.first, self.num_values))

    def encode(self, value: Any, is_batch: bool = False) -> Any:
        """One value, or a batch `[B, ...]` of them, in the spec's dtype. Raises SpecMismatchError."""
        is_exact = self.is_plain and type(value) is np.ndarray and value.dtype == self._dtype and not is_batch
        if is_exact and value.shape == self._shape:
            return value
        if not is_batch and type(value) is int and 0 <= (category := value - self._first) < self._num_values:
            return category
        try:
            array = np.asarray(value)
        except ValueError:  # of a list whose rows differ in length
            raise self._spec_mismatch(repr(value)) from None
        shape, dtype = array.shape, array.dtype
        fits = len(shape) == len(self._shape) + 1 and shape[1:] == self._shape if is_batch else shape == self._shape
        if not fits or dtype.kind not in _ACCEPTED_KINDS[self._dtype.kind]:
            raise self._spec_mismatch(repr(value) if dtype.kind == "O" else f"{dtype} of shape {shape}")
        if not self.is_plain:
            return self._categories(array)
        if dtype in self.taken:
            return array.astype(self._dtype, copy=False)
        return self._floats(array) if self._dtype.kind == "f" else self._integers(array)

    def check_finite(self, array: np.ndarray) -> None:
        """Raises SpecMismatchError where an encoded array holds NaN or infinity."""
        if self._dtype.kind == "f" and not np.isfinite(array).all():
            raise self._outside(array, ~np.isfinite(array), "finite numbers")

    def _categories(self, array: np.ndarray) -> Any:
        if not array.shape and 0 <= (category := int(array) - self._first) < self._num_values:
            return category  # in a quarter of the time that arrays take
        categories = array.astype(np.int64)
        if self._first or self.first.ndim:
            categories = categories - self.first
        # As an unsigned number, one below 0 is above all others.
        wrong = np.asarray(categories).view(np.uint64) >= self.num_values
        if array.dtype == np.uint64:
            wrong = wrong | (array >= np.uint64(2**63))  # which int64 takes for a number below 0
        if np.count_nonzero(wrong):
            last = self.first + (self.num_values.astype(np.int64) - 1)
            raise self._outside(array, wrong, f"whole numbers from {self.first} to {last}")
        return categories.astype(self._dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.spec, self.start)

    def _accepts(self, dtype: np.dtype) -> bool:
        if dtype.kind not in _ACCEPTED_KINDS[self._dtype.kind]:
            return False
        is_integer_as_float = self._dtype.kind == "f" and dtype.kind != "f"
        return is_integer_as_float or np.can_cast(dtype, self._dtype if self.is_plain else self.wide, "safe")

    def _floats(self, array: np.ndarray) -> np.ndarray:
        flat = array.ravel()
        if array.dtype.kind == "f" and not flat.dot(flat) < FLOAT32_MAX_SQUARED:
            wrong = np.isfinite(array) & (np.abs(array) > np.finfo(self._dtype).max)
            if wrong.any():
                raise self._outside(array, wrong, f"numbers that fit {self._dtype}")
        return array.astype(self._dtype)

    def _integers(self, array: np.ndarray) -> np.ndarray:
        narrow = array.astype(self._dtype)
        wrong = narrow != array  # the cast wraps around
        if np.count_nonzero(wrong):
            limits = np.iinfo(self._dtype)
            raise self._outside(array, wrong, f"whole numbers that fit {self._dtype}, {limits.min} to {limits.max}")
        return narrow

    def _spec_mismatch(self, came: str) -> SpecMismatchError:
        return SpecMismatchError(self.spec.name, came, f"{self._dtype} of shape {self._shape}")

    def _outside(self, array: np.ndarray, wrong: Any, expected: str) -> SpecMismatchError:
        place = tuple(int(index[0]) for index in np.nonzero(wrong)) if array.shape else ()
        return SpecMismatchError(self.spec.name, str(array[place]), expected, place)


class ActionLeaf:
    """How actions are decoded.

    Args:
      spec: an action in the framework's types.
      dtype: the environment's own.
      start: the environment's value of each first category; 0 for other actions.
      bounds: the environment's own (low, high), to which continuous actions are clipped.
    """

    def __init__(self, spec: specs.Array, dtype: Any, start: Any = 0, bounds: tuple[Any, Any] | None = None):
        self.spec, self.dtype, self.start, self.bounds = spec, np.dtype(dtype), start, bounds
        self._offset = np.asarray(start, self.dtype) if np.any(start) else None
        self._limits: tuple[Any, ...] = ((),)  # of the batch that came last: (its shape, low, high)

    def decode(self, actions: np.ndarray) -> np.ndarray:
        """`[B, ...]` as the environment takes them. Always a copy: an environment may keep the action that it gets."""
        decoded = actions.astype(self.dtype)
        if self._offset is not None:
            decoded += self._offset
        if self.bounds is not None:
            limits = self._limits
            if limits[0] != decoded.shape:
                # Numpy takes twice the time for arrays of several shapes.
                low, high = (np.broadcast_to(bound, decoded.shape).copy() for bound in self.bounds)
                limits = self._limits = decoded.shape, low, high
            np.maximum(decoded, limits[1], out=decoded)
            np.minimum(decoded, limits[2], out=decoded)
        return decoded

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.spec, self.dtype, self.start, self.bounds)


class Codec:
    """Encodes the observations of one environment and decodes its actions.

    Args:
      observation: a tree (dict, tuple) of `ObservationLeaf`.
      action: an `ActionLeaf`.

    Attributes:
      observation_spec, action_spec: the framework's types of both: a tree of `dm_env.specs`, and one.
      leaves: the `ObservationLeaf`s in the order of `layout`.
    """

    def __init__(self, observation: Tree, action: ActionLeaf):
        structure = Layout(observation)
        self.leaves: list[ObservationLeaf] = structure.leaves
        self.observation_spec: Tree = structure.unflatten([leaf.spec for leaf in self.leaves])
        self.layout = Layout(self.observation_spec)
        self.action, self.action_spec = action, action.spec
        self._only = self.leaves[0] if structure.is_leaf else None

    @classmethod
    def of_specs(cls, observation_spec: Tree, action_spec: specs.Array) -> Codec:
        """A codec for values that are in the framework's types already: it checks observations and changes nothing."""
        layout = Layout(observation_spec)
        leaves = [ObservationLeaf(spec) for spec in layout.leaves]
        return cls(layout.unflatten(leaves), ActionLeaf(action_spec, action_spec.dtype))

    def encode(self, observation: Any, is_batch: bool = False) -> list[Any]:
        """The encoded leaves of an observation, or of a batch `[B, ...]`, in the order of `layout`.

        Any Mapping stands for a dict, and a list for a tuple or an array. Raises SpecMismatchError.
        """
        if self._only is not None:
            return [self._only.encode(observation, is_batch)]
        values = self.layout.flatten(observation)
        return [leaf.encode(value, is_batch) for leaf, value in zip(self.leaves, values, strict=True)]

    def decode(self, actions: np.ndarray) -> list[Any]:
        """The actions `[B, ...]`, one for each of B environments."""
        # A list of numpy scalars or rows; `tolist` would give Python numbers, which some environments refuse.
        return list(self.action.decode(actions))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Codec):
            return NotImplemented
        ours, theirs = ((one.observation_spec, one.action_spec, one.action.dtype) for one in (self, other))
        return ours == theirs and self._starts() == other._starts()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        starts = f", starting at {self._starts()}" if any(map(np.any, self._starts())) else ""
        return f"observations {self.observation_spec} and actions {self.action_spec} of {self.action.dtype}{starts}"

    def _starts(self) -> list[Any]:
        return [np.asarray(start).tolist() for start in (*(leaf.start for leaf in self.leaves), self.action.start)]


_ARRAYS = frozenset([np.ndarray, *NUMBER_TYPES])


class ObservationRows:
    """Encodes the observations of `num_envs` environments into arrays [num_envs, ...].

    Values that need no check go to their row at once. Categories, and values of a wider dtype than the spec's, go to
    the row of a wide array: `finish` checks and casts all rows of it together, in the time that one of them takes.

    Args:
      codec: of the environments.
      first_id: the index in the pool of the environment of row 0; errors name the environments by it.

    Attributes:
      is_leaf: whether an observation is one array, and no dict or tuple.
      leaves: one for each leaf. Where `is_leaf`, an array of the shape `leaves[0].shape` and one of the dtypes
        `leaves[0].taken` may be written without `write`.
    """

    def __init__(self, codec: Codec, first_id: int, num_envs: int):
        self._layout = codec.layout
        self._env_ids = range(first_id, first_id + num_envs)
        self.is_leaf = codec.layout.is_leaf
        self.leaves = [LeafRows(leaf, num_envs) for leaf in codec.leaves]
        self._is_narrow = all(leaf.is_plain for leaf in codec.leaves)  # no leaf has a wide array

    def begin(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Begin a batch for `arrays`. Returns what to write to: `arrays`, or wide ones in the place of some."""
        if self._is_narrow:
            return arrays
        if self.is_leaf:
            return [self.leaves[0].begin(arrays[0])]
        return [leaf.begin(array) for leaf, array in zip(self.leaves, arrays, strict=True)]

    def write(self, i: int, observation: Any, targets: list[np.ndarray]) -> None:
        """Write row `i`. Raises UsageError or EnvError, naming the environment, if the observation does not fit."""
        try:
            values = (observation,) if self.is_leaf else self._layout.flatten(observation)
            for leaf, value, target in zip(self.leaves, values, targets, strict=True):
                array = value if type(value) in _ARRAYS else _as_array(value)
                if array.dtype in leaf.taken and array.shape == leaf.shape:
                    target[i] = array
                else:
                    self._is_narrow &= leaf.write(i, value, array, target)
        except SpecMismatchError as error:
            raise error.for_environment(self._env_ids[i]) from error

    def finish(self, targets: list[np.ndarray], arrays: list[np.ndarray]) -> None:
        """Check and cast what is in wide arrays, once all rows are written. Raises as `write`."""
        if targets is arrays:
            return
        for leaf, target, array in zip(self.leaves, targets, arrays, strict=True):
            if target is not array:
                try:
                    leaf.narrow(target, array)
                except SpecMismatchError as error:
                    raise error.for_batch(self._env_ids) from error

    def write_one(self, i: int, observation: Any, arrays: list[np.ndarray], row: int) -> None:
        """Write an observation of the environment of row `i` into one row of `arrays`. Any thread may call it."""
        try:
            values = (observation,) if self.is_leaf else self._layout.flatten(observation)
            for leaf, value, array in zip(self.leaves, values, arrays, strict=True):
                self._is_narrow &= leaf.write(row, value, value, array)
        except SpecMismatchError as error:
            raise error.for_environment(self._env_ids[i]) from error


class LeafRows:
    """The rows of one leaf.

    Attributes:
      shape: of one value.
      taken: dtypes of which an array of this shape is written as it is.
    """

    def __init__(self, leaf: ObservationLeaf, num_envs: int):
        self._leaf, self._batch = leaf, (num_envs, *leaf.spec.shape)
        self.shape: tuple[int, ...] = leaf.spec.shape
        self.taken = leaf.taken
        self._is_narrow = leaf.is_plain
        self._wide: np.ndarray | None = None
        self._offset = leaf.first if leaf.first.any() else None
        # Of the batch's shape: numpy takes twice the time for arrays of several shapes.
        self._num_values = None if leaf.is_plain else np.broadcast_to(leaf.num_values, self._batch).copy()

    def begin(self, array: np.ndarray) -> np.ndarray:
        """Return what the rows of a batch for `array` are written to."""
        if self._is_narrow:
            return array
        if self._wide is None:
            self._wide, self.taken = np.zeros(self._batch, self._leaf.wide), self._leaf.taken | {self._leaf.wide}
        return self._wide

    def write(self, i: int, value: Any, array: Any, target: np.ndarray) -> bool:
        """Write a value that may not fit (`array` is the same). Returns whether the next batch needs no wide array."""
        encoded = self._leaf.encode(value)
        target[i] = encoded if self._offset is None or target is not self._wide else encoded + self._offset
        self._is_narrow &= getattr(array, "dtype", None) != self._leaf.wide
        return self._is_narrow

    def narrow(self, wide: np.ndarray, array: np.ndarray) -> None:
        """Check the values of a batch and cast them into `array`. Raises SpecMismatchError."""
        if self._num_values is not None:
            values = wide if self._offset is None else wide - self._offset
            # As an unsigned number, one below 0 is above all others.
            if not np.count_nonzero(values.view(np.uint64) >= self._num_values):
                array[...] = values
                return
        elif wide.dtype.kind == "f":
            flat = wide.ravel()
            if flat.dot(flat) < FLOAT32_MAX_SQUARED:
                array[...] = wide
                return
        else:
            array[...] = wide
            if not np.count_nonzero(array != wide):
                return
        array[...] = self._leaf.encode(wide, is_batch=True)


def _as_array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError:  # of a list whose rows differ in length
        return np.asarray(None)
