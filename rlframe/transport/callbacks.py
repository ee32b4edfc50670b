"""One thread that tells who waits for sockets when there is something to read, or when the time is up."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

_Wait = tuple[socket.socket, float, Callable[[], object]]


def call_when_readable(connection: socket.socket, deadline: float, callback: Callable[[], object]) -> None:
    """Has `callback()` called by another thread when there is something to read, or at `time.monotonic() == deadline`.

    Later deadlines than those of calls before are looked at after them.
    """
    _watcher(os.getpid()).add((connection, deadline, callback))


@functools.lru_cache(maxsize=1)
def _watcher(pid: int) -> _Watcher:  # by process: a fork has no thread
    del pid
    return _Watcher()


class _Watcher:
    def __init__(self) -> None:
        self._new: collections.deque[_Wait] = collections.deque()
        self._waits: dict[int, _Wait] = {}  # by descriptor, the earliest first
        self._selector = selectors.DefaultSelector()
        self._wake, woken = socket.socketpair()
        self._wake.setblocking(False)
        woken.setblocking(False)
        self._woken = woken
        self._selector.register(woken, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="rlframe answers", daemon=True).start()

    def add(self, wait: _Wait) -> None:
        self._new.append(wait)
        with contextlib.suppress(BlockingIOError):  # it has much to wake for already
            self._wake.send(b".")

    def _run(self) -> None:
        while True:
            first = next(iter(self._waits.values()), None)
            timeout = None if first is None else max(0.0, first[1] - time.monotonic())
            ready = self._selector.select(timeout)
            for key, _ in ready:
                if key.fileobj is self._woken:
                    self._take()
                else:
                    self._end(key.fd)
            now = time.monotonic()
            for descriptor, wait in list(self._waits.items()):
                if wait[1] > now:
                    break
                self._end(descriptor)

    def _take(self) -> None:
        self._woken.recv(1 << 16)
        while self._new:
            wait = self._new.popleft()
            descriptor = wait[0].fileno()
            if descriptor in self._waits:  # somebody has read its answer already, and used the connection anew
                self._end(descriptor)
            if descriptor < 0:  # the same, and has closed it
                _call(wait[2])
                continue
            self._waits[descriptor] = wait
            self._selector.register(descriptor, selectors.EVENT_READ)

    def _end(self, descriptor: int) -> None:
        _, _, callback = self._waits.pop(descriptor)
        self._selector.unregister(descriptor)
        _call(callback)


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except Exception:
        _log.exception("What was to be done with an answer failed.")
