"""Process identity, liveness, and child processes that die with their parent."""

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
    """Identifies a process by its number and its start time in clock ticks since boot.

    The start time differs for a later process with the same number.
    """

    pid: int
    started: int

    @staticmethod
    def of(pid: int) -> ProcessId:
        """Return the process that has this number now. `started` is -1 if no process or only a zombie has it."""
        return ProcessId(pid, _started(pid))

    @property
    def is_alive(self) -> bool:
        """True if the process is running, sleeping or stopped. A zombie is not alive."""
        return self.pid > 0 and self.started >= 0 and _started(self.pid) == self.started


def this_process() -> ProcessId:
    """Return this process."""
    return _cached_id(os.getpid())


_cached_id = functools.lru_cache(maxsize=1)(ProcessId.of)  # by number, because forked children differ


def _started(pid: int) -> int:
    """Return the start time of a process. -1 if no process or only a zombie has this number."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The process's name, in parentheses, may contain any bytes. After the name follow: state, parent, ...
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies, even if SIGKILL ends the parent. Linux only.

    The kernel treats the *thread* that started this process as the parent (see `start_process`).
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def die_soon_after_parent() -> None:
    """Make the kernel end this process 3 seconds after its parent dies, which leaves time to close resources.

    This works even if a call into C blocks the interpreter, because no Python code needs to run. Does nothing on
    systems other than Linux.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        # The C function `alarm` handles SIGQUIT. Its argument is the signal's number, 3, so SIGALRM follows after 3
        # seconds.
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(signal.SIGQUIT, ctypes.cast(libc.alarm, ctypes.c_void_p))
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


def start_process(command: list[str], **kwargs: Any) -> subprocess.Popen[bytes]:
    """Start a `subprocess.Popen` from a thread that lives as long as this process.

    The kernel treats the end of the thread that started a process as the death of the process's parent.
    """
    if threading.current_thread() is threading.main_thread():
        return subprocess.Popen(command, **kwargs)
    future: Future[subprocess.Popen[bytes]] = Future()
    _start_queue(os.getpid()).put((future, command, kwargs))
    return future.result()


@functools.lru_cache(maxsize=1)
def _start_queue(pid: int) -> SimpleQueue[Any]:
    """Return the queue of a daemon thread that starts processes.

    Do not use an executor, because the interpreter ends the threads of executors too early.
    """
    # Cached by process number, because a forked child has a copy of the queue, but not the queue's thread.
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
