"""Large arrays: to keep rows in, and to gather them into, which are used again once nobody holds them."""

from __future__ import annotations

import sys

import numpy as np

_LARGE = 1 << 18  # bytes; below, a fresh array costs less than looking for a free one
_KEPT = 6  # arrays per key; a reader that holds more than these gets fresh ones


def storage(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that takes memory only as it fills, with arbitrary contents.

    Not `np.zeros`: for arrays like these NumPy asks the kernel for huge pages only in `np.empty`, and gathering rows of
    pixels at random takes a tenth less time with them.
    """
    return np.empty(shape, dtype)


class Outputs:
    """`take` into arrays that are recycled: for pixels, faulting in fresh pages costs more than the copy.

    An array is free when only this pool refers to it. Views, device arrays that alias it (JAX on CPU does not copy) and
    batches all hold a reference, so what a caller still sees is never overwritten.
    """

    def __init__(self) -> None:
        self._arrays: dict[tuple, list[np.ndarray]] = {}

    def take(self, data: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Returns `data[slots]`, `[*slots.shape, *data.shape[1:]]`. Slots below 0 count from the end."""
        if slots.size * data.strides[0] < _LARGE:
            return data.take(slots, axis=0, mode="wrap")
        out = self.empty((*slots.shape, *data.shape[1:]), data.dtype)
        # Any mode but "raise" writes straight into `out`; "raise" would gather into a buffer first.
        data.take(slots, axis=0, mode="wrap", out=out)
        return out

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns an array with arbitrary contents that nobody else refers to."""
        kept = self._arrays.setdefault((shape, dtype), [])
        for i in range(len(kept)):
            if sys.getrefcount(kept[i]) == 2:  # the list, and the argument of getrefcount
                return kept[i]
        array = np.empty(shape, dtype)
        if len(kept) < _KEPT:
            kept.append(array)
        return array
