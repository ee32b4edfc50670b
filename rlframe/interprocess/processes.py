"""Identify processes, check whether they are alive, and start child processes that die with their parent.

`environment_variable` sets an environment variable that child processes inherit. `use_signal_stack` protects the heap
from signals.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

_PR_SET_PDEATHSIG = 1
_SS_DISABLE = 2
_SIGNAL_STACK_BYTES = 1 << 16
_signal_stack: list[Any] = []  # the memory of `use_signal_stack`


class ProcessId(NamedTuple):
    """Identifies a process by its number and its start time in clock ticks since boot.

    The start time is needed because the system can give the same number to a later process.
    """

    pid: int
    started: int

    @staticmethod
    def of(pid: int) -> ProcessId:
        """Return the current process with number `pid`. `started` is -1 if no such process runs (a zombie does not)."""
        return ProcessId(pid, _started(pid))

    @property
    def is_alive(self) -> bool:
        """True if the process is running, sleeping or stopped. A zombie is not alive."""
        return self.pid > 0 and self.started >= 0 and _started(self.pid) == self.started


def this_process() -> ProcessId:
    """Return the `ProcessId` of the process that calls this function."""
    return _cached_id(os.getpid())


_cached_id = functools.lru_cache(maxsize=1)(ProcessId.of)  # cached by number, because a forked child has another number


def _started(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; -1 if no such process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The process's name, in parentheses, can contain any bytes. The fields after it are: state, parent, ...
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies, even by SIGKILL. This works only on Linux.

    The kernel treats the *thread* that started this process as the parent (see `start_process`).
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def die_soon_after_parent() -> None:
    """Make the kernel end this process 3 seconds after its parent dies. In this time, it can close its resources.

    This works even if a call into C blocks the interpreter, because no Python code has to run. On systems other than
    Linux, this function does nothing.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        # Use the C function `alarm` as the handler of SIGQUIT. A handler's argument is the signal's number. For
        # SIGQUIT it is 3, so SIGALRM ends this process 3 seconds later.
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(signal.SIGQUIT, ctypes.cast(libc.alarm, ctypes.c_void_p))
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


def start_process(command: list[str], **kwargs: Any) -> subprocess.Popen[bytes]:
    """Start a child process from a thread that lives until this process ends.

    If a thread starts a child process and then ends, the kernel acts as if the child's parent had died.
    """
    if threading.current_thread() is threading.main_thread():
        return subprocess.Popen(command, **kwargs)
    future: Future[subprocess.Popen[bytes]] = Future()
    _start_queue(os.getpid()).put((future, command, kwargs))
    return future.result()


@functools.lru_cache(maxsize=1)
def _start_queue(pid: int) -> SimpleQueue[Any]:
    """Return the queue of commands for a daemon thread, which starts a process for each command.

    An executor does not work here, because the interpreter ends the threads of executors too early.
    """
    # Cached by process number, because a forked child inherits the queue, but not the thread that reads it.
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


@contextlib.contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable during a `with` block. Then restore its earlier value, or remove the variable."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


class _Stack(ctypes.Structure):
    """`stack_t` of Linux; see `man sigaltstack`."""

    _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def use_signal_stack() -> None:
    """Let signal handlers use a separate stack, if this is the main thread, which receives signals first.

    While oneDNN computes a matrix product in a call of JAX, the stack pointer points into the heap. A signal would
    overwrite a few kilobytes of the heap, and the process would crash later. Python's signal handlers use the separate
    stack if there is one (`SA_ONSTACK`).
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return
    libc, old = ctypes.CDLL(None, use_errno=True), _Stack()
    if libc.sigaltstack(None, ctypes.byref(old)) != 0 or not old.flags & _SS_DISABLE:
        return  # there is already such a stack, for example of `faulthandler`
    _signal_stack.append(memory := ctypes.create_string_buffer(_SIGNAL_STACK_BYTES))
    libc.sigaltstack(ctypes.byref(_Stack(ctypes.addressof(memory), 0, len(memory))), None)
