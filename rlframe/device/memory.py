"""The device memory of a replay, checked before it is allocated."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import psutil

from rlframe.errors import UsageError


def num_bytes(tree: Any) -> int:
    """Return the size of all arrays of a tree."""
    return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def check_memory(needed: int, how_to_shrink: str) -> None:
    """Raise UsageError if a replay needs more memory than the device has.

    Args:
        needed: highest number of bytes that the replay needs at once.
        how_to_shrink: a sentence for the error.
    """
    stats = jax.devices()[0].memory_stats() or {}  # a CPU has no statistics
    free = stats.get("bytes_limit", psutil.virtual_memory().available) - stats.get("bytes_in_use", 0)
    if needed > free:
        raise UsageError(
            f"The replay needs {needed / 2**30:.1f} GiB of device memory, with its copy in a checkpoint, but only "
            f"{free / 2**30:.1f} GiB are free. {how_to_shrink}"
        )
