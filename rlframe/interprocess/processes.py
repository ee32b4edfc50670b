"""Which process is meant, whether it is still there, and how one is made that does not outlive its parent."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

_PR_SET_PDEATHSIG = 1


class ProcessId(NamedTuple):
    """A process, told apart from a later one with the same number by when it started (clock ticks since boot)."""

    pid: int
    started: int

    @staticmethod
    def of(pid: int) -> ProcessId:
        """Return the process that has this number now; `started` is -1 if there is none, or only a zombie."""
        return ProcessId(pid, _started(pid))

    @property
    def is_alive(self) -> bool:
        """True if it runs, sleeps or is stopped. A zombie is not alive."""
        return self.pid > 0 and self.started >= 0 and _started(self.pid) == self.started


def this_process() -> ProcessId:
    """Return this process."""
    return _cached_id(os.getpid())


_cached_id = functools.lru_cache(maxsize=1)(ProcessId.of)  # by its number: a fork is another


def _started(pid: int) -> int:
    """Return when the process started; -1 if there is none, or only a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # After its name in parentheses, which may hold anything: state, parent, ...
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies, even from SIGKILL. Needs Linux, as nodes do.

    For the kernel the parent is the *thread* that made this process: see `start_process`.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def die_soon_after_parent() -> None:
    """Make the kernel end this process 3 seconds after its parent dies. Until then it may close.

    Even in the middle of a call into C that keeps Python's lock: no Python runs for it. Does nothing beyond Linux.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        # The handler is C's `alarm` itself: called with the signal's number, 3, it has SIGALRM end us in 3 seconds.
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(signal.SIGQUIT, ctypes.cast(libc.alarm, ctypes.c_void_p))
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


def start_process(command: list[str], **kwargs: Any) -> subprocess.Popen[bytes]:
    """Make a `subprocess.Popen` from a thread that lives as long as this process: its end is the parent's."""
    if threading.current_thread() is threading.main_thread():
        return subprocess.Popen(command, **kwargs)
    future: Future[subprocess.Popen[bytes]] = Future()
    _start_queue(os.getpid()).put((future, command, kwargs))
    return future.result()


@functools.lru_cache(maxsize=1)
def _start_queue(pid: int) -> SimpleQueue[Any]:
    """Return the queue of a daemon thread that starts processes. The interpreter ends an executor too early."""
    # By process: a fork has the queue, but not its thread.
    queue: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_start_all, args=(queue,), name="rlframe starter", daemon=True).start()
    return queue


def _start_all(queue: SimpleQueue[Any]) -> None:
    while True:
        future, command, kwargs = queue.get()
        try:
            future.set_result(subprocess.Popen(command, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        del future, command, kwargs
