"""A `Futex` wakes other processes. An `Inbox` wakes a thread of this process.

A futex is a word of shared memory. Processes sleep until another process changes the word. A futex has no name or
descriptor, so a crash leaves nothing behind. A futex costs nothing while no process sleeps. A wake-up is only a hint.
So a sleeping process passes a timeout, and checks the shared counters when it wakes up.
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

_FUTEX_SYSCALLS = {"x86_64": 202, "aarch64": 98}  # number of the futex system call on each machine type
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
        self._word = ctypes.c_uint32.from_buffer(word)  # the lower half: all machines with HAS_FUTEX are little-endian
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))
        self._number = ctypes.c_long(_FUTEX_SYSCALLS[_MACHINE])
        self._wake = (self._number, self._address, ctypes.c_int(_WAKE), ctypes.c_int(_ALL_WAITERS), None, None, _ZERO)

    @property
    def value(self) -> int:
        """The value to pass to `wait`. Read this value before you check the condition that you wait for."""
        return self._word.value

    def wait(self, value: int, timeout: float) -> bool:
        """Sleep until another process calls `wake`, for at most `timeout` seconds.

        Return at once if the word is not `value`.

        Returns:
            False after a timeout. True otherwise, although possibly no process has called `wake`.
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
        """Wake all sleepers. A process that is about to sleep returns from `wait` at once."""
        self._word.value += 1  # wraps at 2^32; two simultaneous calls may add only 1, which is enough
        _libc.syscall(*self._wake)


# On x86-64, other processes see the stores of a process in program order, and loads are not reordered with loads.
# Other machines need a barrier between writing data and announcing the data.
NEEDS_FENCE = _MACHINE != "x86_64"
_fence_word = ctypes.c_uint32()


def fence() -> None:
    """Execute a full memory barrier if this machine needs one.

    The kernel executes a barrier in a system call that wakes nobody.
    """
    if NEEDS_FENCE:
        number = ctypes.c_long(_FUTEX_SYSCALLS[_MACHINE])
        _libc.syscall(
            number, ctypes.byref(_fence_word), ctypes.c_int(_WAKE), ctypes.c_int(1), None, None, ctypes.c_int(0)
        )


_Item = TypeVar("_Item")


class Inbox(Generic[_Item]):
    """A queue with one reader. Threads and signal handlers may add items.

    The standard queues do not work with signal handlers. Before Python 3.13, `queue.SimpleQueue.get(timeout=...)` never
    returns if a signal handler runs longer than the timeout. `queue.Queue.put` deadlocks if a signal handler that
    interrupts the reader calls it.
    """

    def __init__(self) -> None:
        self._items: collections.deque[_Item] = collections.deque()
        self._has_items = threading.Lock()  # released when items may be available
        self._has_items.acquire()

    def put(self, item: _Item) -> None:
        """Add an item. Threads and signal handlers may call it."""
        self._items.append(item)
        with contextlib.suppress(RuntimeError):  # already released
            self._has_items.release()

    def get(self, timeout: float) -> _Item:
        """Remove and return the first item. If no item arrives within `timeout` seconds, raise `queue.Empty`."""
        if self._items:
            return self._items.popleft()
        deadline = time.monotonic() + timeout
        while not self._items:
            if not self._has_items.acquire(timeout=max(0.0, deadline - time.monotonic())) and not self._items:
                raise queue.Empty
        return self._items.popleft()
