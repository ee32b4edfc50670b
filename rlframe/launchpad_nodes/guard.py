"""The guard of a Launchpad node: a small process that outlives the node, and reports and handles its end.

Started by `rlframe.launchpad_nodes.node`. It needs neither the node's interpreter lock nor the launcher's help:

- The node fails or is killed: name it, ask the launcher to stop, and kill the launcher once all other nodes have ended.
- The launcher dies: ask every node of the program to stop, and kill those that have not ended after `GRACE`.
- The program stops: kill the node after `GRACE`, before Launchpad kills every process, its launcher included.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import NamedTuple

import psutil

from rlframe.interprocess.processes import ProcessId

ENTRY = "launchpad/nodes/python/process_entry.py"  # the script that runs a node
DATA_FILE = "job.pkl"  # the pickled nodes; Launchpad makes a temporary directory for each such file
WRAPPER = "run_locally/decorate_output"  # the shell script before a node's output, with terminal="current_terminal"
GRACE = 8.0  # seconds from SIGTERM to SIGKILL; Launchpad gives 10

_POLL_INTERVAL = 0.2  # seconds between two looks at the processes
_SCAN = 2.0  # seconds between two looks for other nodes
_CONFIRM = 1.5  # seconds in which SIGTERM arrives if the program was stopping: Launchpad repeats it every second
_KILL_WITHIN = 3.0  # seconds in which a launcher that gets SIGQUIT kills its nodes and itself


class Node(NamedTuple):
    """A node of the program, as a process."""

    process: ProcessId
    data_file: str  # of its group: what Launchpad pickled for it, in a temporary directory


class Guard:
    """Watches one node and its launcher.

    Args:
        node: the node to guard.
        launcher: the process that called `lp.launch`; in a terminal of the node's own, the node's parent.
        title: the node's name, such as "actor/0".
        hides_exit_code: whether the launcher cannot see how the node ends; else Launchpad ends the program itself, and
            the guard sends the launcher no signal.
        reports: a file descriptor. The node writes "well", "stopped" or "failed REASON" to it before it ends.
    """

    def __init__(self, node: Node, launcher: ProcessId, title: str, hides_exit_code: bool, reports: int) -> None:
        self._node, self._launcher, self._title = node.process, launcher, title
        self._hides_exit_code, self._reports = hides_exit_code, reports
        self._report = ""
        self._nodes = {node}  # all that were seen
        self._scanned_at = float("-inf")
        self._stopped_at: float | None = None

    def stop(self) -> None:
        """Note that the program stops: the launcher has sent SIGTERM."""
        self._stopped_at = self._stopped_at or time.monotonic()

    def run(self) -> None:
        """Return when the node has ended and everything that follows from its end is done."""
        os.set_blocking(self._reports, False)
        while self._node.is_alive and self._launcher.is_alive:
            if time.monotonic() > self._scanned_at + _SCAN:
                self._scan()
            if self._read_report().startswith("failed"):
                break
            if self._stopped_at is not None and time.monotonic() > self._stopped_at + GRACE:
                self._say(f"did not end within {GRACE:g} s after SIGTERM: killed")
                kill_tree(self._node)
            time.sleep(_POLL_INTERVAL)
        if not self._launcher.is_alive:
            self._end_orphans()
        elif (
            self._read_report() not in ("well", "stopped")
            and self._hides_exit_code
            and not self._is_stopping_within(_CONFIRM)
        ):
            self._end_program()

    def _end_program(self) -> None:
        """Stop the program, and kill the launcher at last: nothing else makes its exit code differ from 0."""
        reason = self._report.partition(" ")[2] or "its process was killed or crashed"
        self._say(f"failed: {reason}. Ending the program")
        self._scan()
        send(self._launcher, signal.SIGTERM)
        if self._launcher.pid == 1:  # of a container: it gets no signal, so it does not stop its nodes
            for node in self._others():
                send(node.process, signal.SIGTERM)
        _wait_while(lambda: self._launcher.is_alive and bool(self._others()), GRACE)
        remove_data(self._nodes)  # now: Launchpad kills this process too
        send(self._launcher, signal.SIGQUIT)  # Launchpad kills all nodes and then itself
        _wait_while(lambda: self._launcher.is_alive, _KILL_WITHIN)
        for process in (*(node.process for node in self._nodes), self._launcher):
            kill_tree(process)

    def _end_orphans(self) -> None:
        """End all nodes of a launcher that died, those without a guard too."""
        nodes = [node for node in self._nodes if node.process.is_alive]
        if nodes:
            self._say("ends: its launcher died")
        for node in nodes:
            send(node.process, signal.SIGTERM)
        _wait_while(lambda: any(node.process.is_alive for node in nodes), GRACE)
        for node in nodes:
            kill_tree(node.process)
        remove_data(self._nodes)

    def _others(self) -> list[Node]:
        return [node for node in nodes_of(self._launcher.pid) if node.process != self._node]

    def _scan(self) -> None:
        """Remember the launcher's nodes: once it is dead, nothing relates them to it."""
        self._scanned_at = time.monotonic()
        self._nodes.update(nodes_of(self._launcher.pid))

    def _read_report(self) -> str:
        with contextlib.suppress(BlockingIOError):
            self._report += os.read(self._reports, 4096).decode(errors="replace")
        return self._report

    def _is_stopping_within(self, seconds: float) -> bool:
        _wait_while(lambda: self._stopped_at is None, seconds)
        return self._stopped_at is not None

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # whoever read the output may be dead
            print(f"rlframe: the node {self._title} {text}.", flush=True)


def _wait_while(condition: Callable[[], bool], seconds: float) -> None:
    """Sleep until the condition no longer holds, for `seconds` at most."""
    end = time.monotonic() + seconds
    while condition() and time.monotonic() < end:
        time.sleep(_POLL_INTERVAL)


def nodes_of(launcher: int) -> list[Node]:
    """Return the nodes that a launcher started, by its process number."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in psutil.Process(launcher).children(recursive=True):
            command = command_of(each.pid)
            if any(part.endswith(ENTRY) for part in command) and not is_wrapper(command):
                found.append(Node(ProcessId.of(each.pid), data_file_of(command)))
    return found


def end_starting_nodes(launcher: int) -> None:
    """Kill the nodes that have not imported rlframe yet: until then they ignore SIGTERM, and run no code of users."""
    for node in nodes_of(launcher):
        if ignores(node.process.pid, signal.SIGTERM):
            send(node.process, signal.SIGKILL)


def remove_data(nodes: Iterable[Node]) -> None:
    """Remove the pickled nodes and their directories, as Launchpad does unless it is killed."""
    for path in {node.data_file for node in nodes if os.path.basename(node.data_file) == DATA_FILE}:
        with contextlib.suppress(OSError):
            os.remove(path)
            os.rmdir(os.path.dirname(path))


def kill_tree(process: ProcessId) -> None:
    """Kill a process and everything it started, unless it is PID 1: everything descends from that."""
    if process.pid == 1 or not process.is_alive:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        for each in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                if each.pid != os.getpid():
                    each.kill()


def send(process: ProcessId, number: int) -> None:
    """Send a signal, unless the process has ended or is PID 1."""
    if process.pid != 1 and process.is_alive:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def is_wrapper(command: list[str]) -> bool:
    """Return True if a command line is that of Launchpad's script that prefixes the lines of a node."""
    return any(part.endswith(WRAPPER) for part in command[:3])


def data_file_of(command: list[str]) -> str:
    """Return the path of the file with a node's pickled constructor, from its command line; empty if it has none."""
    return command[command.index("--data_file") + 1] if "--data_file" in command[:-1] else ""


def command_of(pid: int) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).cmdline()
    return []


def ignores(pid: int, number: int) -> bool:
    """Return True if a process ignores a signal."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("SigIgn:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def arguments(node: Node, launcher: ProcessId, title: str, hides_exit_code: bool) -> list[str]:
    """Return the command line's end for `main`."""
    return [str(each) for each in (*node.process, *launcher, hides_exit_code, node.data_file, title)]


def main() -> None:
    """Read the arguments of `Guard` from the command line, as `arguments` wrote them, and reports from stdin."""
    node_pid, node_started, launcher_pid, launcher_started, hides_exit_code, data_file, title = sys.argv[1:]
    node = Node(ProcessId(int(node_pid), int(node_started)), data_file)
    launcher = ProcessId(int(launcher_pid), int(launcher_started))
    guard = Guard(node, launcher, title, hides_exit_code == "True", sys.stdin.fileno())

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        guard.stop()

    signal.signal(signal.SIGTERM, stop)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guard.run()
