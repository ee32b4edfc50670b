"""A queue for one reader, whose wait ends in time although signals arrive."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class Inbox(Generic[_Item]):
    """A queue from any number of threads, and from signal handlers, to one reader.

    Before Python 3.13, `queue.SimpleQueue.get(timeout=...)` never returns if a signal handler outlasts the timeout.
    `queue.Queue.put` blocks if a signal handler interrupts the reader and calls it.
    """

    def __init__(self) -> None:
        self._items: collections.deque[_Item] = collections.deque()
        self._news = threading.Lock()  # free: there may be items
        self._news.acquire()

    def put(self, item: _Item) -> None:
        """Add an item. Threads and signal handlers may call it."""
        self._items.append(item)
        with contextlib.suppress(RuntimeError):  # it is free
            self._news.release()

    def get(self, timeout: float) -> _Item:
        """Remove the first item, and wait up to `timeout` seconds for one. Raises `queue.Empty` if none came."""
        if self._items:
            return self._items.popleft()
        deadline = time.monotonic() + timeout
        while not self._items:
            if not self._news.acquire(timeout=max(0.0, deadline - time.monotonic())) and not self._items:
                raise queue.Empty
        return self._items.popleft()
