"""Write the observations of a batch of environments into its arrays, one row after another."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlframe.envs.codec import FITS_FLOAT32, NUMBER_TYPES, Codec, ObservationLeaf
from rlframe.envs.layout import MisfitError

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
        except MisfitError as error:
            raise error.of_environment(self._env_ids[i]) from error

    def finish(self, targets: list[np.ndarray], arrays: list[np.ndarray]) -> None:
        """Check and cast what is in wide arrays, once all rows are written. Raises as `write`."""
        if targets is arrays:
            return
        for leaf, target, array in zip(self.leaves, targets, arrays, strict=True):
            if target is not array:
                try:
                    leaf.narrow(target, array)
                except MisfitError as error:
                    raise error.of_row(self._env_ids) from error

    def write_one(self, i: int, observation: Any, arrays: list[np.ndarray], row: int) -> None:
        """Write an observation of the environment of row `i` into one row of `arrays`. Any thread may call it."""
        try:
            values = (observation,) if self.is_leaf else self._layout.flatten(observation)
            for leaf, value, array in zip(self.leaves, values, arrays, strict=True):
                self._is_narrow &= leaf.write(row, value, value, array)
        except MisfitError as error:
            raise error.of_environment(self._env_ids[i]) from error


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
        """Check the values of a batch and cast them into `array`. Raises MisfitError."""
        if self._num_values is not None:
            values = wide if self._offset is None else wide - self._offset
            # As an unsigned number, one below 0 is above all others.
            if not np.count_nonzero(values.view(np.uint64) >= self._num_values):
                array[...] = values
                return
        elif wide.dtype.kind == "f":
            flat = wide.ravel()
            if flat.dot(flat) < FITS_FLOAT32:
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
