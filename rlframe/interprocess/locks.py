"""A lock between processes, on a file or on memory: let go by who dies."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator

_AGAIN = 0.002  # seconds between two tries


@contextlib.contextmanager
def held(descriptor: int, timeout: float, overdue: Callable[[], Exception]) -> Iterator[None]:
    """Holds the lock of an open file; threads of one process that share the descriptor share the lock, too.

    Args:
        descriptor: of the file.
        timeout: seconds to wait for it.
        overdue: gives the error that is raised where another process has had it for so long.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise overdue() from None
            time.sleep(_AGAIN)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
