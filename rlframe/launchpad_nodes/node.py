"""Pickle the nodes of plain `lp.launch`, so that each node starts its guard before its constructor.

The launcher pickles each node with `restore`. The process of the node calls `restore`, which starts the node's guard.
If an object of rlframe gets a node instead of the node's handle, pickling raises UsageError in the launcher. Otherwise
the error would only occur in the node's process, which constructs the object.
When the program stops, the launcher kills nodes that are still importing modules.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

import psutil

from rlframe import extras
from rlframe.errors import UsageError
from rlframe.interprocess.processes import ProcessId, this_process
from rlframe.launchpad_nodes.guard import (
    ENTRY,
    Node,
    arguments,
    command_of,
    data_file_of,
    end_starting_nodes,
    is_wrapper,
)

_GUARD = "import sys; sys.path += {!r}; from rlframe.launchpad_nodes.guard import main; main()"
_MAX_REASON = 1000  # maximum number of characters of an error message in a report
_THREAD_NAME = "rlframe: waits for lp.launch to start nodes"
_LAUNCH_TIMEOUT = 60.0  # maximum seconds from the pickling of a node until Launchpad starts nodes
_POLL_INTERVAL = 0.1  # seconds between checks whether Launchpad starts nodes

_has_guard = False


def start_guard_in_node(launcher: ProcessId, session: int) -> None:
    """Start a guard if this process is a node of plain `lp.launch`, and report the node's end to the guard.

    Launchpad starts nodes with SIGTERM ignored, and installs its handler after all imports. This function installs a
    handler for the time between, which ends the node immediately.

    Args:
        launcher: the process that pickled the node. It may be dead.
        session: session id of the launcher.
    """
    global _has_guard
    entry = sys.modules["__main__"]
    # A child process of `multiprocessing` runs the same file under another module name.
    if entry.__name__ != "__main__" or not str(getattr(entry, "__file__", "")).endswith(ENTRY):
        return
    if _has_guard:  # this process has already unpickled a node, because a node may contain other nodes
        return
    _has_guard = True
    report = _Report(_start_guard(launcher, session))
    report.chain_excepthook()
    atexit.register(report.end)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, report.stop)


def _start_guard(launcher: ProcessId, session: int) -> int:
    """Start the guard. Return a file descriptor to which reports are written."""
    parent = os.getppid()
    command = command_of(parent)
    # A node with its own terminal is in another session than the launcher, and ends when the terminal ends.
    in_terminal = os.getsid(0) != session
    hides_exit_code = is_wrapper(command) and not in_terminal
    # The parent's command is: decorate_output COLOR TITLE COMMAND ...
    title = command[command.index(sys.executable) - 1] if sys.executable in command[1:] else str(os.getpid())
    # Without site packages the guard starts faster. It imports only rlframe and psutil.
    places = [__file__.rpartition("/rlframe/")[0], psutil.__file__.rpartition("/psutil/")[0]]
    node = Node(this_process(), data_file_of(command_of(os.getpid())))
    own = arguments(node, ProcessId.of(parent) if in_terminal else launcher, title, hides_exit_code)
    guard = subprocess.Popen([sys.executable, "-I", "-S", "-c", _GUARD.format(places), *own], stdin=subprocess.PIPE)
    assert guard.stdin is not None
    return os.dup(guard.stdin.fileno())


class _Report:
    """Writes one report to the guard: "failed REASON", "stopped" or "well"."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._pid = descriptor, os.getpid()

    def chain_excepthook(self) -> None:
        """Report an exception that ends the main thread. The hook runs before Python waits for other threads."""
        previous_hook = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            previous_hook(kind, error, trace)
            first_line = f"{kind.__name__}: {error}".strip().partition("\n")[0].rstrip(".")
            self._write(f"failed {first_line[:_MAX_REASON]} (the traceback is above)")

        sys.excepthook = hook

    def end(self) -> None:
        """Report the end of the interpreter. `sys.last_type` is set after an exception, even without our hook."""
        kind = getattr(sys, "last_type", None)
        self._write("well" if kind is None else f"failed {kind.__name__}")

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Report that the program stops, and exit. The guard may have started too late to receive SIGTERM.

        Launchpad's handler also calls this one. In that case the node is already running: do nothing, so that the node
        can end normally.
        """
        del frame
        if signal.getsignal(number) != self.stop:
            return
        self._write("stopped")
        os._exit(128 + number)

    def _write(self, text: str) -> None:
        if self._descriptor >= 0 and self._pid == os.getpid():  # a forked child inherits the hooks, but must not report
            with contextlib.suppress(OSError):  # the guard was killed, so it reads no report
                os.write(self._descriptor, text.encode(errors="replace"))
                os.close(self._descriptor)
            self._descriptor = -1


def register(kind: Any) -> None:
    """Set `__reduce_ex__` of Launchpad's base class of nodes."""
    kind.__reduce_ex__ = _reduce


def _reduce(node: Any, protocol: Any) -> tuple[Any, ...]:
    if not any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        threading.Thread(target=_end_starting_nodes_at_stop, name=_THREAD_NAME, daemon=True).start()
    _refuse_arguments(node)
    reduced: Any = object.__reduce_ex__(node, protocol)
    make, arguments, *rest = reduced
    if rest and isinstance(rest[0], dict) and not isinstance(node._function, ReportedExit):
        rest[0] = {**rest[0], "_function": ReportedExit(node._function)}
    return restore, (this_process(), os.getsid(0), make, *arguments), *rest


def _end_starting_nodes_at_stop() -> None:
    """Let the launcher kill nodes that still ignore SIGTERM, each time it sends SIGTERM.

    On a busy machine, nodes may ignore SIGTERM for longer than Launchpad waits.
    """
    manager, end = sys.modules["launchpad.launch.worker_manager"], time.monotonic() + _LAUNCH_TIMEOUT
    while time.monotonic() < end:
        # Wait until Launchpad has registered its own handler. Launchpad handles SIGINT for the nodes only if its
        # handler is the first one.
        if signal.SIGUSR1 in (manager._SIGNAL_HANDLERS or ()):
            manager.register_stop_handler(_end_starting_nodes)
            return
        time.sleep(_POLL_INTERVAL)


def _end_starting_nodes() -> None:
    end_starting_nodes(os.getpid())
    # Register again: Launchpad removes handlers after it has called them.
    sys.modules["launchpad.launch.worker_manager"].register_stop_handler(_end_starting_nodes)


def restore(launcher: ProcessId, session: int, make: Callable[..., Any], *arguments: Any) -> Any:
    """Start the guard, and return a new node without its state."""
    start_guard_in_node(launcher, session)
    return make(*arguments)


class ReportedExit:
    """Wraps the function of a node: `sys.exit` with a code other than 0 is reported like an exception."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._function(*args, **kwargs)
        except SystemExit as error:
            if error.code not in (None, 0):
                sys.excepthook(SystemExit, error, error.__traceback__)
            raise


def refuse_nodes(given: Any, where: str) -> None:
    """Raise UsageError if an argument is or contains a Launchpad node instead of the node's handle.

    Args:
        given: the argument. Lists, tuples, dicts and arguments of `functools.partial` are searched.
        where: end of the message, such as "to Actor" or "as the learner".
    """
    if extras.is_instance(given, "launchpad.nodes.base", "Node"):
        kind = type(given).__name__
        raise UsageError(f"A {kind} was given {where}: give the handle that program.add_node(node) returns.")
    held: Iterable[Any] = ()
    if type(given) is functools.partial:
        held = (given.args, given.keywords)
    elif type(given) is dict:
        held = given.values()
    elif type(given) is list or isinstance(given, tuple):
        held = given
    for each in held:
        refuse_nodes(each, where)


def _refuse_arguments(node: Any) -> None:
    """Raise UsageError if an argument of a class of rlframe is a node: see `refuse_nodes`."""
    made_by: Any = getattr(node, "_constructor", None)
    while isinstance(made_by, functools.partial):
        made_by = made_by.func
    if any(kind.__module__.startswith("rlframe.") for kind in getattr(made_by, "__mro__", ())):
        refuse_nodes((node._constructor, node._args, node._kwargs), f"to {made_by.__name__}")
