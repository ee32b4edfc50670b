"""What rlframe does in a node of plain `lp.launch`: it starts the node's guard.

`launchpad_pickling.restore` calls it, which every node passes before its constructor runs, whatever it runs.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
from types import FrameType, TracebackType

from rlframe.interprocess.launchpad_guard import ENTRY, Node, arguments, command_of, data_file_of, is_wrapper
from rlframe.interprocess.processes import ProcessId, this_process

_GUARD = "import sys; sys.path.append({!r}); from rlframe.interprocess.launchpad_guard import main; main()"
_LONGEST_REASON = 1000  # characters

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
    root = __file__.rpartition("/rlframe/")[0]
    node = Node(this_process(), data_file_of(command_of(os.getpid())))
    own = arguments(node, ProcessId.of(parent) if in_terminal else launcher, title, hides_exit_code)
    guard = subprocess.Popen([sys.executable, "-I", "-S", "-c", _GUARD.format(root), *own], stdin=subprocess.PIPE)
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
