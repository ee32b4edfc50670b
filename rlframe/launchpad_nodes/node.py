"""Pickle the nodes of plain `lp.launch`, so that each node starts its guard before it runs user code.

Each pickled node calls `restore` when the node's process unpickles it. `restore` starts the node's guard.
If an object of rlframe gets a node instead of the node's handle, pickling raises UsageError in the launcher. Without
this check, the error would occur later, in the node's process.
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
from rlframe.errors import StoppedError, UsageError
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
from rlframe.shutdown import is_program_stopping

_GUARD = "import sys; sys.path += {!r}; from rlframe.launchpad_nodes.guard import main; main()"
_MAX_REASON = 1000  # an error message in a report is cut after this number of characters
_THREAD_NAME = "rlframe: waits for lp.launch to start nodes"
_LAUNCH_TIMEOUT = 60.0  # maximum seconds from the pickling of a node until Launchpad starts nodes
_POLL_INTERVAL = 0.1  # seconds between two checks of whether Launchpad starts nodes

_has_guard = False


def start_guard_in_node(launcher: ProcessId, session: int) -> None:
    """If this process is a node of plain `lp.launch`, start a guard, and let the node report its end to the guard.

    A new node ignores SIGTERM until Launchpad installs a handler, after all imports. Until then, a handler of this
    function ends the node at SIGTERM.

    Args:
        launcher: the process that pickled the node. It may be dead.
        session: session id of the launcher.
    """
    global _has_guard
    entry = sys.modules["__main__"]
    # A child process of `multiprocessing` runs the same file under another module name.
    if entry.__name__ != "__main__" or not str(getattr(entry, "__file__", "")).endswith(ENTRY):
        return
    if _has_guard:  # a node can contain other nodes, so this process may already have unpickled one
        return
    _has_guard = True
    report = _Report(_start_guard(launcher, session))
    report.chain_excepthook()
    atexit.register(report.end)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, report.stop)


def _start_guard(launcher: ProcessId, session: int) -> int:
    """Start the guard. Return the file descriptor to which the node must write its report."""
    parent = os.getppid()
    command = command_of(parent)
    # If a node has its own terminal, its session is not the launcher's, and the node ends when the terminal ends.
    in_terminal = os.getsid(0) != session
    hides_exit_code = is_wrapper(command) and not in_terminal
    # The parent's command is: decorate_output COLOR TITLE COMMAND ...
    title = command[command.index(sys.executable) - 1] if sys.executable in command[1:] else str(os.getpid())
    # The guard starts faster without site-packages (option -S). It needs only rlframe and psutil.
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
        """Install a hook that reports an exception in the main thread, even while other threads still run."""
        previous_hook = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            previous_hook(kind, error, trace)
            first_line = f"{kind.__name__}: {error}".strip().partition("\n")[0].rstrip(".")
            self._write(f"failed {first_line[:_MAX_REASON]} (the traceback is above)")

        sys.excepthook = hook

    def end(self) -> None:
        """Report at exit whether an exception ended the node. Python stores its type even without our hook."""
        kind = getattr(sys, "last_type", None)
        self._write("well" if kind is None else f"failed {kind.__name__}")

    def stop(self, number: int, _: FrameType | None) -> None:
        """Handle SIGTERM: report that the program is stopping, and exit at once.

        The report is needed because the guard may have started too late to receive SIGTERM. Launchpad's own handler
        calls this handler too. The node is then already running: do nothing, so that it can end normally.
        """
        if signal.getsignal(number) != self.stop:
            return
        self._write("stopped")
        os._exit(128 + number)

    def _write(self, text: str) -> None:
        if self._descriptor >= 0 and self._pid == os.getpid():  # a forked child must not report
            with contextlib.suppress(OSError):  # the guard may have been killed
                os.write(self._descriptor, text.encode(errors="replace"))
                os.close(self._descriptor)
            self._descriptor = -1


def register(kind: Any) -> None:
    """Install the pickling method in `kind`, which is Launchpad's base class of nodes."""
    kind.__reduce_ex__ = _reduce


def _reduce(node: Any, protocol: Any) -> tuple[Any, ...]:
    if not any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        threading.Thread(target=_end_starting_nodes_at_stop, name=_THREAD_NAME, daemon=True).start()
    _refuse_arguments(node)
    reduced: Any = object.__reduce_ex__(node, protocol)
    make, arguments, *rest = reduced
    if rest and isinstance(rest[0], dict) and not isinstance(node._function, NodeFunction):
        rest[0] = {**rest[0], "_function": NodeFunction(node._function)}
    return restore, (this_process(), os.getsid(0), make, *arguments), *rest


def _end_starting_nodes_at_stop() -> None:
    """Make the launcher kill nodes that still ignore SIGTERM, whenever it sends SIGTERM to its nodes.

    On a busy machine, a node's imports, during which it ignores SIGTERM, can take longer than Launchpad waits.
    """
    manager, end = sys.modules["launchpad.launch.worker_manager"], time.monotonic() + _LAUNCH_TIMEOUT
    while time.monotonic() < end:
        # Launchpad's own handler must be registered first. Otherwise Launchpad does not handle SIGINT for its nodes.
        if signal.SIGUSR1 in (manager._SIGNAL_HANDLERS or ()):
            manager.register_stop_handler(_end_starting_nodes)
            return
        time.sleep(_POLL_INTERVAL)


def _end_starting_nodes() -> None:
    end_starting_nodes(os.getpid())
    # Register again: Launchpad removes handlers after it has called them.
    sys.modules["launchpad.launch.worker_manager"].register_stop_handler(_end_starting_nodes)


def restore(launcher: ProcessId, session: int, make: Callable[..., Any], *arguments: Any) -> Any:
    """Start the guard, and return a new node. Pickle then sets the state of the node."""
    start_guard_in_node(launcher, session)
    return make(*arguments)


class NodeFunction:
    """Wraps a node's function.

    `sys.exit(1)` in the function is reported like an exception. StoppedError while the program stops is a normal end.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._function(*args, **kwargs)
        except StoppedError:
            if not is_program_stopping():
                raise
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
    """Raise UsageError if `node` constructs an object of rlframe, and an argument of this object is a node."""
    made_by: Any = getattr(node, "_constructor", None)
    while isinstance(made_by, functools.partial):
        made_by = made_by.func
    if any(kind.__module__.startswith("rlframe.") for kind in getattr(made_by, "__mro__", ())):
        refuse_nodes((node._constructor, node._args, node._kwargs), f"to {made_by.__name__}")
