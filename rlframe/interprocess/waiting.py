"""Waiting: a `Futex` for another process, an `Inbox` for threads and signal handlers of this one.

A futex is a word of shared memory on which a process sleeps until another process changes it. It needs neither a name
nor a descriptor, so nothing of it is left behind, and costs nothing while nobody sleeps.
Wake-ups are hints: who sleeps says for how long at most, and looks at the counters afterwards.
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

_FUTEX_SYSCALLS = {"x86_64": 202, "aarch64": 98}  # of the system call
_MACHINE = os.uname().machine
_WAIT, _WAKE = 0, 1
_ALL_WAITERS = 2**31 - 1
_ZERO = ctypes.c_int(0)
HAS_FUTEX = _MACHINE in _FUTEX_SYSCALLS


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_libc = ctypes.CDLL(None, use_errno=True)


class Futex:
    """A word of shared memory that any process which maps it may sleep on.

    Args:
        word: one int64, zero at first; the lower half is used.
    """

    def __init__(self, word: memoryview) -> None:
        self._word = ctypes.c_uint32.from_buffer(word)  # byte order: the systems that are HAS_FUTEX are little-endian
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))
        self._number = ctypes.c_long(_FUTEX_SYSCALLS[_MACHINE])
        self._wake = (self._number, self._address, ctypes.c_int(_WAKE), ctypes.c_int(_ALL_WAITERS), None, None, _ZERO)

    @property
    def value(self) -> int:
        """The value that `wait` must be given: read it before you look at what you wait for."""
        return self._word.value

    def wait(self, value: int, timeout: float) -> bool:
        """Sleep until somebody wakes, for at most `timeout` seconds; not at all if the word is not `value`.

        Returns:
            Whether it was woken, or may have been.
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
        """Wake all who sleep, and keep those awake who were about to."""
        self._word.value += 1  # wraps at 2^32; two processes at once may count one, which still is a change
        _libc.syscall(*self._wake)


# x86-64 shows every process the stores of another one in their order, and keeps loads in theirs. Others need a barrier
# between data and the cursor that says that it is there.
NEEDS_FENCE = _MACHINE != "x86_64"
_fence_word = ctypes.c_uint32()


def fence() -> None:
    """Execute a full memory barrier, if this machine needs one. (A system call that wakes nobody contains one.)"""
    if NEEDS_FENCE:
        number = ctypes.c_long(_FUTEX_SYSCALLS[_MACHINE])
        _libc.syscall(
            number, ctypes.byref(_fence_word), ctypes.c_int(_WAKE), ctypes.c_int(1), None, None, ctypes.c_int(0)
        )


_Item = TypeVar("_Item")


class Inbox(Generic[_Item]):
    """A queue from any number of threads, and from signal handlers, to one reader.

    Before Python 3.13, `queue.SimpleQueue.get(timeout=...)` never returns if a signal handler outlasts the timeout.
    `queue.Queue.put` blocks if a signal handler interrupts the reader and calls it.
    """

    def __init__(self) -> None:
        self._items: collections.deque[_Item] = collections.deque()
        self._has_items = threading.Lock()  # free: there may be items
        self._has_items.acquire()

    def put(self, item: _Item) -> None:
        """Add an item. Threads and signal handlers may call it."""
        self._items.append(item)
        with contextlib.suppress(RuntimeError):  # it is free
            self._has_items.release()

    def get(self, timeout: float) -> _Item:
        """Remove the first item, and wait up to `timeout` seconds for one. Raises `queue.Empty` if none came."""
        if self._items:
            return self._items.popleft()
        deadline = time.monotonic() + timeout
        while not self._items:
            if not self._has_items.acquire(timeout=max(0.0, deadline - time.monotonic())) and not self._items:
                raise queue.Empty
        return self._items.popleft()
