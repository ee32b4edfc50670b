"""Keep the memory that updates free.

An update of a convolutional network allocates and frees hundreds of MB. By default, glibc returns them to the kernel,
and the next update faults them in again, page by page: a third of the processor time of PPO's update on Pong.
"""

from __future__ import annotations

import ctypes
import functools
import os

import jax

# <malloc.h>; the values are for mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_NEVER, _GROWTH = -1, 64 << 20  # bytes
_SAME = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")


@functools.cache
def keep_freed_memory() -> bool:
    """Make the C library keep the memory that this process frees, from now on, for this process.

    Returns:
        Whether the setting is made: not where updates run on an accelerator, where the C library is not glibc, or where
        the environment sets one of these options (`MALLOC_TRIM_THRESHOLD_` and so on).
    """
    if jax.default_backend() != "cpu" or any(name in os.environ for name in _SAME):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all([mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, _NEVER), mallopt(_M_TOP_PAD, _GROWTH)])
