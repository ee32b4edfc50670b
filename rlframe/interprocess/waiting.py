"""A `Futex` wakes other processes. An `Inbox` wakes a thread of this process.

A futex is a word of shared memory. Processes sleep until another process changes the word. A futex has no name or
descriptor, so a crash leaves nothing behind. A process can also wake up although nothing has changed. So it checks the
shared counters after each wake-up, and always sleeps with a timeout.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import math
import os
import queue
import threading
import time
from typing import Generic, TypeVar

_FUTEX_SYSCALLS = {"x86_64": 202, "aarch64": 98}  # machine type -> number of the futex system call
_MACHINE = os.uname().machine
_WAIT, _WAKE = 0, 1
_ALL_WAITERS = 2**31 - 1
_ZERO = ctypes.c_int(0)
HAS_FUTEX = _MACHINE in _FUTEX_SYSCALLS


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_libc = ctypes.CDLL(None, use_errno=True)


class Futex:
    """A word of shared memory. Processes that map the memory can sleep until the word changes.

    Args:
        word: one int64, initially zero. Only its lower half is used.
    """

    def __init__(self, word: memoryview) -> None:
        self._word = ctypes.c_uint32.from_buffer(word)  # the lower half, because these machines are little-endian
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))
        self._number = ctypes.c_long(_FUTEX_SYSCALLS[_MACHINE])
        self._wake = (self._number, self._address, ctypes.c_int(_WAKE), ctypes.c_int(_ALL_WAITERS), None, None, _ZERO)

    @property
    def value(self) -> int:
        """Current value of the word. First read it, then check your condition, then pass the value to `wait`."""
        return self._word.value

    def wait(self, value: int, timeout: float) -> bool:
        """Sleep until another process calls `wake`, for at most `timeout` seconds.

        Return at once if the word's current value is not `value`.

        Returns:
            False after a timeout, else True. True does not prove that a process has called `wake`.
        """
        fraction, seconds = math.modf(max(0.0, timeout))
        limit = _Timespec(int(seconds), int(fraction * 1e9))
        arguments = (ctypes.c_int(_WAIT), ctypes.c_uint32(value), ctypes.byref(limit), None, _ZERO)
        if _libc.syscall(self._number, self._address, *arguments) == -1:
            number = ctypes.get_errno()
            if number not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
                raise OSError(number, os.strerror(number))
            return number != errno.ETIMEDOUT
        return True

    def wake(self) -> None:
        """Wake all processes that sleep in `wait`. A process that begins `wait` at this moment does not sleep."""
        self._word.value += 1  # wraps around at 2^32; two simultaneous calls may add only 1, which is enough
        _libc.syscall(*self._wake)


# On x86-64, other processes see all writes of a process in program order, and reads are not reordered either. Other
# machines need a memory barrier after the data is written, and before the data is announced.
NEEDS_FENCE = _MACHINE != "x86_64"
_fence_word = ctypes.c_uint32()


def fence() -> None:
    """Execute a full memory barrier if this machine needs one.

    To do this, make a futex system call that wakes nobody: the kernel executes a barrier during this call.
    """
    if NEEDS_FENCE:
        number = ctypes.c_long(_FUTEX_SYSCALLS[_MACHINE])
        _libc.syscall(
            number, ctypes.byref(_fence_word), ctypes.c_int(_WAKE), ctypes.c_int(1), None, None, ctypes.c_int(0)
        )


_Item = TypeVar("_Item")


class Inbox(Generic[_Item]):
    """A queue with one reader, to which threads and signal handlers can add items.

    Python's own queues fail with signal handlers. Before Python 3.13, `queue.SimpleQueue.get(timeout=...)` never
    returns if a signal handler runs longer than the timeout. `queue.Queue.put` deadlocks in a signal handler that
    interrupts the reader.
    """

    def __init__(self) -> None:
        self._items: collections.deque[_Item] = collections.deque()
        self._has_items = threading.Lock()  # released when items may be available
        self._has_items.acquire()

    def put(self, item: _Item) -> None:
        """Add an item. Threads and signal handlers may call this method."""
        self._items.append(item)
        with contextlib.suppress(RuntimeError):  # already released
            self._has_items.release()

    def get(self, timeout: float) -> _Item:
        """Remove and return the first item. If no item arrives within `timeout` seconds, raise `queue.Empty`."""
        deadline = time.monotonic() + timeout
        while not self._items:
            if not self._has_items.acquire(timeout=max(0.0, deadline - time.monotonic())) and not self._items:
                raise queue.Empty
        return self._items.popleft()
