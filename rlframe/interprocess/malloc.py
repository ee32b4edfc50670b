"""Settings of glibc's malloc for a learner's process. docs/performance.md has the measurements.

One arena: by default, glibc gives the threads of a process up to 8 arenas per core. An arena keeps the memory that its
threads freed, and threads of other arenas cannot use it. Orbax starts about 19 threads for each checkpoint, and each
thread takes any free arena. So memory grows until every arena has once held the most that any thread needs.

Keep freed memory: an update of a convolutional network allocates and frees hundreds of MB. By default, glibc returns
this memory to the kernel, and the next update faults it in again, page by page. That took a third of the CPU time of
PPO on Pong.
"""

from __future__ import annotations

import ctypes
import functools
import os

# from <malloc.h>; the values are described in mallopt(3)
_M_ARENA_MAX, _M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -8, -1, -2, -4
_NEVER, _GROWTH = -1, 64 << 20  # bytes
_KEEP_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")


@functools.cache
def use_one_arena() -> bool:
    """Limit malloc to one arena for all threads of this process.

    Call this at the start of a process: there is one arena until a second thread allocates. Existing arenas stay. JAX's
    threads allocate from the first computation on; `import jax` starts none.

    Returns:
        True if the limit is set. False if the environment sets the number of arenas, or the C library is not glibc.
    """
    if "MALLOC_ARENA_MAX" in os.environ or "glibc.malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    return _mallopt((_M_ARENA_MAX, 1))


@functools.cache
def keep_freed_memory() -> bool:
    """Make malloc keep the memory that this process frees from now on.

    Returns:
        True if the options are set. False if updates run on an accelerator, the environment sets one of these options
        (`MALLOC_TRIM_THRESHOLD_` and so on), or the C library is not glibc.
    """
    import jax

    if jax.default_backend() != "cpu" or any(name in os.environ for name in _KEEP_VARIABLES):
        return False
    return _mallopt((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, _GROWTH))


def _mallopt(*options: tuple[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    done = [mallopt(option, value) for option, value in options]
    return all(done)
