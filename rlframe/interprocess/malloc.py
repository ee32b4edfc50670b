"""Settings of memory management: glibc's malloc for a learner's process, and Python's garbage collector.

docs/project/speed.md has the measurements of malloc.

`use_one_arena`: By default, glibc splits the memory of a process into arenas, up to 8 per core. An arena keeps the
memory that its threads freed, and threads of other arenas cannot use this memory. Orbax starts about 19 threads for
each checkpoint, and each thread gets any free arena. So, with time, every arena grows to the size that the largest
thread needs.

`keep_freed_memory`: An update of a convolutional network allocates and frees hundreds of MB. By default, glibc returns
this memory to the kernel, and the next update causes a page fault for each page. These page faults took a third of the
CPU time of PPO on Pong.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import os
from collections.abc import Iterator

# constants from <malloc.h>, which mallopt(3) describes
_M_ARENA_MAX, _M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -8, -1, -2, -4
_NEVER, _GROWTH = -1, 64 << 20  # bytes
_KEEP_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")


@functools.cache
def use_one_arena() -> bool:
    """Limit malloc to one arena for all threads of this process.

    Call this function at the start of a process. Later, a second thread may have created another arena, which stays.
    JAX's threads start with the first computation, not with `import jax`.

    Returns:
        True if the limit is set. False if an environment variable sets the number of arenas, or if the C library is not
        glibc.
    """
    if "MALLOC_ARENA_MAX" in os.environ or "glibc.malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    return _mallopt((_M_ARENA_MAX, 1))


@functools.cache
def keep_freed_memory() -> bool:
    """Make malloc keep the memory that this process frees from now on.

    Returns:
        True if malloc's options are set. False if updates run on an accelerator, if an environment variable sets one of
        these options (such as `MALLOC_TRIM_THRESHOLD_`), or if the C library is not glibc.
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


@contextlib.contextmanager
def rare_garbage_collections() -> Iterator[None]:
    """Make garbage collections rarer in a process of a run, and skip them at its exit.

    Imports and compilations create few cycles but many objects, and after each collection, JAX runs an additional one.
    This saves 5 % of the processor time of a short run, and half a second at its exit.
    """
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 50)
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        gc.set_threshold(*before)
