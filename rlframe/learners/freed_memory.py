"""What updates free stays this process's own.

An update of a convolutional network allocates and frees hundreds of MB. glibc gives them back to the kernel each time,
and they are faulted in again, page by page: a third of the processor time of PPO's update on Pong.
"""

from __future__ import annotations

import ctypes
import functools
import os

import jax

# <malloc.h>; the values are for mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_NEVER, _GROWTH = -1, 64 << 20  # bytes


@functools.cache
def keep_freed_memory() -> bool:
    """Has the C library keep what this process frees, from now on, for the process's own use.

    Returns whether it will: it does not where updates run on an accelerator, where the C library is not glibc, or where
    the environment says how malloc is to behave (`MALLOC_...`).
    """
    if jax.default_backend() != "cpu" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all([mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, _NEVER), mallopt(_M_TOP_PAD, _GROWTH)])
