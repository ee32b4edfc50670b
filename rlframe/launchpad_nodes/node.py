"""Plain `lp.launch`: how its nodes are pickled, and what runs in each of them before its constructor.

The launcher pickles each node with `restore`. The process of the node calls it first, and it starts the node's guard.
A node is refused where its handle is expected. (Launchpad makes our objects in the processes of the nodes.)
When the program stops, the launcher ends nodes that still import.
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
_LONGEST_REASON = 1000  # characters
_WAITS = "rlframe: waits for lp.launch to start nodes"  # a thread
_LAUNCHES_WITHIN = 60.0  # seconds from the pickling of a node to the start of nodes
_POLL_INTERVAL = 0.1  # seconds

_has_guard = False


def start_guard_in_node(launcher: ProcessId, session: int) -> None:
    """Start a guard if this process is a node of plain `lp.launch`, and report to it how the node ends.

    Args:
        launcher: the process that pickled the node. It may be dead.
        session: the launcher's.

    Launchpad starts nodes with SIGTERM ignored and handles it after all imports. Until then, SIGTERM ends the node
    at once.
    """
    global _has_guard
    entry = sys.modules["__main__"]
    # A child that `multiprocessing` spawns runs the same file under another name.
    if entry.__name__ != "__main__" or not str(getattr(entry, "__file__", "")).endswith(ENTRY):
        return
    if _has_guard:  # it has unpickled a node before: a node may hold others
        return
    _has_guard = True
    report = _Report(_start_guard(launcher, session))
    report.chain_excepthook()
    atexit.register(report.end)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, report.stop)


def _start_guard(launcher: ProcessId, session: int) -> int:
    """Start the guard. Return the file descriptor that it reads reports from."""
    parent = os.getppid()
    command = command_of(parent)
    # A node that has a terminal is in another session than the launcher, and ends with its terminal.
    in_terminal = os.getsid(0) != session
    hides_exit_code = is_wrapper(command) and not in_terminal
    # decorate_output COLOR TITLE COMMAND ...
    title = command[command.index(sys.executable) - 1] if sys.executable in command[1:] else str(os.getpid())
    # Without site packages it starts sooner: it imports psutil, and no more.
    places = [__file__.rpartition("/rlframe/")[0], psutil.__file__.rpartition("/psutil/")[0]]
    node = Node(this_process(), data_file_of(command_of(os.getpid())))
    own = arguments(node, ProcessId.of(parent) if in_terminal else launcher, title, hides_exit_code)
    guard = subprocess.Popen([sys.executable, "-I", "-S", "-c", _GUARD.format(places), *own], stdin=subprocess.PIPE)
    assert guard.stdin is not None
    return os.dup(guard.stdin.fileno())


class _Report:
    """Writes to the guard once: "failed REASON", "stopped" or "well"."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._pid = descriptor, os.getpid()

    def chain_excepthook(self) -> None:
        """Report an exception that ends the main thread, before Python waits for other threads."""
        shown_by = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            shown_by(kind, error, trace)
            first_line = f"{kind.__name__}: {error}".strip().partition("\n")[0].rstrip(".")
            self._write(f"failed {first_line[:_LONGEST_REASON]} (the traceback is above)")

        sys.excepthook = hook

    def end(self) -> None:
        """Report the end of the interpreter. `sys.last_type`: an exception ended it, and the hook was replaced."""
        kind = getattr(sys, "last_type", None)
        self._write("well" if kind is None else f"failed {kind.__name__}")

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Report that the program stops, and end. The guard itself may have started too late for SIGTERM.

        Launchpad's handler calls this one too: then the node has begun, and ends in its own time.
        """
        del frame
        if signal.getsignal(number) != self.stop:
            return
        self._write("stopped")
        os._exit(128 + number)

    def _write(self, text: str) -> None:
        if self._descriptor >= 0 and self._pid == os.getpid():  # a forked child has the hooks too
            with contextlib.suppress(OSError):  # the guard was killed
                os.write(self._descriptor, text.encode(errors="replace"))
                os.close(self._descriptor)
            self._descriptor = -1


def register(kind: Any) -> None:
    """Give Launchpad's class of nodes, and so its subclasses, a `__reduce_ex__`."""
    kind.__reduce_ex__ = _reduce


def _reduce(node: Any, protocol: Any) -> tuple[Any, ...]:
    if not any(thread.name == _WAITS for thread in threading.enumerate()):
        threading.Thread(target=_end_starting_nodes_at_stop, name=_WAITS, daemon=True).start()
    _refuse_arguments(node)
    reduced: Any = object.__reduce_ex__(node, protocol)
    make, arguments, *rest = reduced
    if rest and isinstance(rest[0], dict) and not isinstance(node._function, ReportedExit):
        rest[0] = {**rest[0], "_function": ReportedExit(node._function)}
    return restore, (this_process(), os.getsid(0), make, *arguments), *rest


def _end_starting_nodes_at_stop() -> None:
    """Make the launcher kill nodes that still ignore SIGTERM, each time it sends SIGTERM to them.

    On a busy machine they may do so for longer than Launchpad waits.
    """
    manager, end = sys.modules["launchpad.launch.worker_manager"], time.monotonic() + _LAUNCHES_WITHIN
    while time.monotonic() < end:
        # Launchpad itself must be the first that registers a handler: only then does it take over SIGINT for its nodes.
        if signal.SIGUSR1 in (manager._SIGNAL_HANDLERS or ()):
            manager.register_stop_handler(_end_starting_nodes)
            return
        time.sleep(_POLL_INTERVAL)


def _end_starting_nodes() -> None:
    end_starting_nodes(os.getpid())
    # Register it again: Launchpad forgets handlers that it has called.
    sys.modules["launchpad.launch.worker_manager"].register_stop_handler(_end_starting_nodes)


def restore(launcher: ProcessId, session: int, make: Callable[..., Any], *arguments: Any) -> Any:
    """Start the guard and make a node without its state."""
    start_guard_in_node(launcher, session)
    return make(*arguments)


class ReportedExit:
    """The function of a node, whose `sys.exit` with a code that is not 0 is reported as an exception is."""

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
    """Raise UsageError for a Launchpad node: its handle is expected.

    Args:
        given: may be a node, or hold one: in lists, tuples, dicts and arguments of `functools.partial`.
        where: the end of the message, such as "to Actor" or "as the learner".
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
    """Refuse nodes that are given to an object of ours."""
    made_by: Any = getattr(node, "_constructor", None)
    while isinstance(made_by, functools.partial):
        made_by = made_by.func
    if any(kind.__module__.startswith("rlframe.") for kind in getattr(made_by, "__mro__", ())):
        refuse_nodes((node._constructor, node._args, node._kwargs), f"to {made_by.__name__}")
