"""One malloc arena for the threads of a learner's process: without it, each checkpoint makes the process larger.

glibc gives the threads of a process up to 8 arenas per core. An arena keeps the memory that its threads freed, and
threads of other arenas cannot use it. Orbax starts about 19 threads for each checkpoint, and each thread takes any free
arena. So memory grows until each arena has once held the most that any thread needs (docs/performance.md).
"""

from __future__ import annotations

import ctypes
import functools
import os

_M_ARENA_MAX = -8  # <malloc.h>


@functools.cache
def use_one_arena() -> bool:
    """Make all threads of this process allocate from the arenas that exist now.

    Call it at the start of a process: until a second thread allocates, there is one arena. JAX's threads allocate from
    the first computation on, and `import jax` starts none.

    Returns:
        Whether the setting is made: not where the environment sets the number of arenas, and only with glibc.
    """
    if "MALLOC_ARENA_MAX" in os.environ or "glibc.malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_ARENA_MAX, 1))
