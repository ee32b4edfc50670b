"""`Codec` encodes observations in the framework's dtypes, and decodes actions to the environment's dtypes.

Every pool, `TrainedPolicy.act`, `evaluate`, `export` and `EnvServer` use a `Codec`. Each checkpoint of a run
contains the codec.

Observations: float64 becomes float32, and int64 becomes int32, as by default in JAX. Categories start at 0.
Actions are converted in the reverse direction, and clipped to the environment's bounds.
If a value does not fit the new dtype, an error with the name of the leaf is raised.

`ObservationRows` encodes the observations of many environments into the arrays of a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dm_env import specs

from rlframe.envs.layout import Layout, SpecMismatchError
from rlframe.types import MultiDiscreteArray, Tree

# If the sum of the squares of some numbers is below this limit, each number fits float32. The sum takes a fifth of the
# time of comparing each number.
FLOAT32_MAX_SQUARED = float(np.finfo(np.float32).max) ** 2

# Kind of a spec's dtype -> kinds of dtypes that this spec accepts, if the values fit. Integer specs reject floats.
_ACCEPTED_KINDS = {"b": "b", "i": "iub", "u": "iub", "f": "fiub"}

_DTYPES = [np.dtype(char) for char in "?bhilqBHILQefd"]
_ARRAYS = frozenset([np.ndarray, *(dtype.type for dtype in _DTYPES)])  # NumPy's types of arrays and scalars


def as_array(value: Any) -> np.ndarray:
    """Return a value as an array. Return `np.asarray(None)`, whose dtype is object, if it cannot be converted."""
    try:
        return np.asarray(value)
    except Exception:  # rows that differ in length, or a user's object, whose conversion may raise any exception
        return np.asarray(None)


class ObservationLeaf:
    """Encodes one array of an observation.

    Args:
      spec: spec of the encoded array.
      start: the environment's number for the first category, for each element; 0 if the array has no categories.

    Attributes:
      is_plain: False if the array contains categories. A plain array of the spec's shape and dtype needs no change.
      accepted_dtypes: dtypes whose values need no check, because all their values fit the spec's dtype. For an array
        of categories: dtypes whose values all fit int64.
      wide_dtype: dtype of the wide array, in which the values of a batch are collected before the check and the cast.
    """

    def __init__(self, spec: specs.Array, start: Any = 0):
        self.spec, self.start = spec, start
        self.is_plain = not isinstance(spec, (specs.DiscreteArray, MultiDiscreteArray))
        self._shape, self._dtype = spec.shape, spec.dtype
        self.wide_dtype = np.dtype(np.float64 if self._dtype.kind == "f" else np.int64)
        self.accepted_dtypes = frozenset(filter(self._accepts, _DTYPES))
        self.first = np.asarray(start, np.int64)
        # Number of categories, or 0 for a plain array.
        self.num_values = np.asarray(getattr(spec, "num_values", 0), np.uint64)
        self._first, self._num_values = (int(one) if one.ndim == 0 else 0 for one in (self.first, self.num_values))

    def encode(self, value: Any, is_batch: bool = False) -> Any:
        """Return one value or a batch `[B, ...]` in the spec's dtype. Raise SpecMismatchError if it does not fit."""
        is_exact = self.is_plain and type(value) is np.ndarray and value.dtype == self._dtype and not is_batch
        if is_exact and value.shape == self._shape:
            return value
        if not is_batch and type(value) is int and 0 <= (category := value - self._first) < self._num_values:
            return category
        try:
            array = np.asarray(value)
        except ValueError:  # a list whose rows differ in length
            raise self._spec_mismatch(repr(value)) from None
        shape, dtype = array.shape, array.dtype
        fits = len(shape) == len(self._shape) + 1 and shape[1:] == self._shape if is_batch else shape == self._shape
        if not fits or dtype.kind not in _ACCEPTED_KINDS[self._dtype.kind]:
            raise self._spec_mismatch(repr(value) if dtype.kind == "O" else f"{dtype} of shape {shape}")
        if not self.is_plain:
            return self._categories(array)
        if dtype in self.accepted_dtypes:
            return array.astype(self._dtype, copy=False)
        return self._floats(array) if self._dtype.kind == "f" else self._integers(array)

    def check_finite(self, array: np.ndarray) -> None:
        """Raise SpecMismatchError if an encoded array contains NaN or infinity."""
        if self._dtype.kind == "f" and not np.isfinite(array).all():
            raise self._outside(array, ~np.isfinite(array), "finite numbers")

    def _categories(self, array: np.ndarray) -> Any:
        if not array.shape and 0 <= (category := int(array) - self._first) < self._num_values:
            return category  # takes a quarter of the time of the array check below
        categories = array.astype(np.int64)
        if self._first or self.first.ndim:
            categories = categories - self.first
        # As unsigned numbers, negative numbers become very large. So one comparison finds all invalid numbers.
        wrong = np.asarray(categories).view(np.uint64) >= self.num_values
        if array.dtype == np.uint64:
            wrong = wrong | (array >= np.uint64(2**63))  # these numbers do not fit int64
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
        return is_integer_as_float or np.can_cast(dtype, self._dtype if self.is_plain else self.wide_dtype, "safe")

    def _floats(self, array: np.ndarray) -> np.ndarray:
        flat = array.ravel()
        if array.dtype.kind == "f" and not flat.dot(flat) < FLOAT32_MAX_SQUARED:
            wrong = np.isfinite(array) & (np.abs(array) > np.finfo(self._dtype).max)
            if wrong.any():
                raise self._outside(array, wrong, f"numbers that fit {self._dtype}")
        return array.astype(self._dtype)

    def _integers(self, array: np.ndarray) -> np.ndarray:
        narrow = array.astype(self._dtype)
        wrong = narrow != array  # a value that does not fit overflows in the cast
        if np.count_nonzero(wrong):
            limits = np.iinfo(self._dtype)
            raise self._outside(array, wrong, f"whole numbers that fit {self._dtype}, {limits.min} to {limits.max}")
        return narrow

    def _spec_mismatch(self, received: str) -> SpecMismatchError:
        return SpecMismatchError(self.spec.name, received, f"{self._dtype} of shape {self._shape}")

    def _outside(self, array: np.ndarray, wrong: Any, expected: str) -> SpecMismatchError:
        place = tuple(int(index[0]) for index in np.nonzero(wrong)) if array.shape else ()
        return SpecMismatchError(self.spec.name, str(array[place]), expected, place)


class ActionLeaf:
    """Decodes actions of the framework to actions of the environment.

    Args:
      spec: spec of the framework's actions.
      dtype: dtype of the environment's actions.
      start: the environment's number for the first category, for each element; 0 if actions have no categories.
      bounds: (low, high) limits to which continuous actions are clipped. None means no clipping.
    """

    def __init__(self, spec: specs.Array, dtype: Any, start: Any = 0, bounds: tuple[Any, Any] | None = None):
        self.spec, self.dtype, self.start, self.bounds = spec, np.dtype(dtype), start, bounds
        self._offset = np.asarray(start, self.dtype) if np.any(start) else None
        self._limits: tuple[Any, ...] = ((),)  # (shape of the latest batch, low, high)

    def decode(self, actions: np.ndarray) -> np.ndarray:
        """Return a copy of `actions` [B, ...] in the environment's dtype, within the environment's bounds."""
        decoded = actions.astype(self.dtype)
        if self._offset is not None:
            decoded += self._offset
        if self.bounds is not None:
            limits = self._limits
            if limits[0] != decoded.shape:
                # Broadcast once per batch shape: NumPy takes twice the time for arrays of different shapes.
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
      observation_spec: a tree of `dm_env.specs` for encoded observations.
      action_spec: a `dm_env.specs.Array` for the framework's actions.
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
        """Return a codec for values that already have the framework's dtypes. It only checks observations."""
        layout = Layout(observation_spec)
        leaves = [ObservationLeaf(spec) for spec in layout.leaves]
        return cls(layout.unflatten(leaves), ActionLeaf(action_spec, action_spec.dtype))

    def encode(self, observation: Any, is_batch: bool = False) -> list[Any]:
        """Return the encoded leaves of an observation, or of a batch `[B, ...]`, in the order of `layout`.

        Accept any Mapping instead of a dict, and a list instead of a tuple or array. Raise SpecMismatchError if a value
        does not fit.
        """
        if self._only is not None:
            return [self._only.encode(observation, is_batch)]
        values = self.layout.flatten(observation)
        return [leaf.encode(value, is_batch) for leaf, value in zip(self.leaves, values, strict=True)]

    def decode(self, actions: np.ndarray) -> list[Any]:
        """Decode actions `[B, ...]`, and return one action for each of the B environments."""
        # Return NumPy scalars or rows, because some environments refuse the Python numbers that `tolist` returns.
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


class ObservationRows:
    """Encodes the observations of `num_envs` environments into arrays [num_envs, ...].

    `write` writes values that need no check to the final arrays. It writes categories, and values whose dtype is wider
    than the spec's dtype, to a wide array. `finish` checks and casts the whole wide array in one operation. This
    operation takes about the time of a check of one row.

    Args:
      codec: the codec of the environments.
      first_id: the id of the environment in row 0, for error messages.
      num_envs: number of rows.

    Attributes:
      is_leaf: True if an observation is a single array. False if it is a dict or tuple.
      leaves: one `LeafRows` for each leaf. If `is_leaf` is True, the caller may write some arrays directly, without
        `write`. These arrays have the shape `leaves[0].shape` and a dtype in `leaves[0].accepted_dtypes`.
    """

    def __init__(self, codec: Codec, first_id: int, num_envs: int):
        self._layout = codec.layout
        self._env_ids = range(first_id, first_id + num_envs)
        self.is_leaf = codec.layout.is_leaf
        self.leaves = [LeafRows(leaf, num_envs) for leaf in codec.leaves]
        self._is_narrow = all(leaf.is_plain for leaf in codec.leaves)  # no leaf has a wide array

    def begin(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Begin a batch. Return the arrays to which to write: each array in `arrays`, or a wide array in its place."""
        if self._is_narrow:
            return arrays
        if self.is_leaf:
            return [self.leaves[0].begin(arrays[0])]
        return [leaf.begin(array) for leaf, array in zip(self.leaves, arrays, strict=True)]

    def write(self, i: int, observation: Any, targets: list[np.ndarray]) -> None:
        """Write row `i`. Raise UsageError or EnvError with the environment's id if the observation does not fit."""
        try:
            values = (observation,) if self.is_leaf else self._layout.flatten(observation)
            for leaf, value, target in zip(self.leaves, values, targets, strict=True):
                array = value if type(value) in _ARRAYS else as_array(value)
                if array.dtype in leaf.accepted_dtypes and array.shape == leaf.shape:
                    target[i] = array
                else:
                    self._is_narrow &= leaf.write(i, value, array, target)
        except SpecMismatchError as error:
            raise error.for_environment(self._env_ids[i]) from error

    def finish(self, targets: list[np.ndarray], arrays: list[np.ndarray]) -> None:
        """Check the wide arrays and cast them into `arrays`, after the last `write`. Raise the errors of `write`."""
        if targets is arrays:
            return
        for leaf, target, array in zip(self.leaves, targets, arrays, strict=True):
            if target is not array:
                try:
                    leaf.narrow(target, array)
                except SpecMismatchError as error:
                    raise error.for_batch(self._env_ids) from error

    def write_one(self, i: int, observation: Any, arrays: list[np.ndarray], row: int) -> None:
        """Write an observation of the group's environment `i` to row `row` of `arrays`. Any thread may call this."""
        try:
            values = (observation,) if self.is_leaf else self._layout.flatten(observation)
            for leaf, value, array in zip(self.leaves, values, arrays, strict=True):
                self._is_narrow &= leaf.write(row, value, value, array)
        except SpecMismatchError as error:
            raise error.for_environment(self._env_ids[i]) from error


class LeafRows:
    """Writes the values of one leaf of the observations to the rows of a batch.

    Attributes:
      shape: the shape of one value.
      accepted_dtypes: dtypes of arrays that need no check before they are written to the current target.
    """

    def __init__(self, leaf: ObservationLeaf, num_envs: int):
        self._leaf, self._batch = leaf, (num_envs, *leaf.spec.shape)
        self.shape: tuple[int, ...] = leaf.spec.shape
        self.accepted_dtypes = leaf.accepted_dtypes
        self._is_narrow = leaf.is_plain
        self._wide: np.ndarray | None = None
        self._offset = leaf.first if leaf.first.any() else None
        # Broadcast to the shape of the batch: NumPy takes twice the time for arrays of different shapes.
        self._num_values = None if leaf.is_plain else np.broadcast_to(leaf.num_values, self._batch).copy()

    def begin(self, array: np.ndarray) -> np.ndarray:
        """Return the array to which to write a batch: `array`, or a wide array if some values may not fit `array`."""
        if self._is_narrow:
            return array
        if self._wide is None:
            self._wide, self.accepted_dtypes = (
                np.zeros(self._batch, self._leaf.wide_dtype),
                self._leaf.accepted_dtypes | {self._leaf.wide_dtype},
            )
        return self._wide

    def write(self, i: int, value: Any, array: Any, target: np.ndarray) -> bool:
        """Encode, check and write a value. Return True if the next batch needs no wide array.

        Args:
          i: the row.
          value: the value.
          array: the same value as an array.
          target: the array to which the value is written.
        """
        encoded = self._leaf.encode(value)
        target[i] = encoded if self._offset is None or target is not self._wide else encoded + self._offset
        self._is_narrow &= getattr(array, "dtype", None) != self._leaf.wide_dtype
        return self._is_narrow

    def narrow(self, wide: np.ndarray, array: np.ndarray) -> None:
        """Check a batch of values and cast them into `array`. Raise SpecMismatchError if a value does not fit."""
        if self._num_values is not None:
            values = wide if self._offset is None else wide - self._offset
            # As unsigned numbers, negative numbers become very large. So one comparison finds all invalid numbers.
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
