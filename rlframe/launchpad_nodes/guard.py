"""The guard of a Launchpad node: a small process that watches one node, and acts when the node ends.

`rlframe.launchpad_nodes.node` starts the guard. The guard works even if the node holds the GIL or the launcher dies:

- If the node fails or is killed: print its name, send SIGTERM to the launcher, and kill the launcher when all other
  nodes have ended.
- If the launcher dies: send SIGTERM to every node of the program, and kill the nodes that still run after `GRACE`.
- If the program stops: kill the node after `GRACE`. Otherwise Launchpad would soon kill all processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import psutil

from rlframe.interprocess.processes import ProcessId

ENTRY = "launchpad/nodes/python/process_entry.py"  # the script that runs a node
DATA_FILE = "job.pkl"  # file name that Launchpad gives to pickled nodes, in a temporary directory
WRAPPER = "run_locally/decorate_output"  # shell script that prefixes a node's output, for terminal="current_terminal"
GRACE = 8.0  # seconds from SIGTERM to SIGKILL; Launchpad's own limit is 10 seconds

_POLL_INTERVAL = 0.2  # seconds between checks of the processes
_SCAN_INTERVAL = 2.0  # seconds between searches for other nodes
_CONFIRM_TIMEOUT = 1.5  # seconds to wait for a SIGTERM; Launchpad sends one every second while the program stops


class Node(NamedTuple):
    """A node of the program, as a process."""

    process: ProcessId
    data_file: str  # path of the file that contains this node and its group, pickled


class Guard:
    """Watches one node and its launcher.

    Args:
        node: the node to guard.
        launcher: the process that called `lp.launch`. If the node has its own terminal: the node's parent process.
        title: name of the node, such as "actor/0".
        hides_exit_code: True if the launcher cannot see the node's exit code. If False, Launchpad itself ends the
            program after a failure, and the guard sends no signal to the launcher.
        reports: file descriptor from which the guard reads the node's last report: "well", "stopped" or
            "failed REASON".
    """

    def __init__(self, node: Node, launcher: ProcessId, title: str, hides_exit_code: bool, reports: int) -> None:
        self._node, self._launcher, self._title = node.process, launcher, title
        self._hides_exit_code, self._reports = hides_exit_code, reports
        self._report = ""
        self._nodes = {node}  # all nodes that `_scan` has found
        self._scanned_at = float("-inf")
        self._stopped_at: float | None = None

    def stop(self) -> None:
        """Record that the program is stopping. Called when the launcher sends SIGTERM."""
        self._stopped_at = self._stopped_at or time.monotonic()

    def run(self) -> None:
        """Wait until the node or the launcher ends. Then end the other processes if necessary."""
        os.set_blocking(self._reports, False)
        while self._node.is_alive and self._launcher.is_alive:
            if time.monotonic() > self._scanned_at + _SCAN_INTERVAL:
                self._scan()
            if self._read_report().startswith("failed"):
                break
            if self._stopped_at is not None and time.monotonic() > self._stopped_at + GRACE:
                self._print(f"did not end within {GRACE:g} s after SIGTERM, and was killed")
                kill_tree(self._node)
            time.sleep(_POLL_INTERVAL)
        if not self._launcher.is_alive:
            self._end_orphans()
        elif (
            self._read_report() not in ("well", "stopped")
            and self._hides_exit_code
            and not self._is_stopping_within(_CONFIRM_TIMEOUT)
        ):
            self._end_program()

    def _end_program(self) -> None:
        """Stop the program, and kill the launcher at the end, because it would otherwise exit with code 0.

        Do not kill Launchpad's scripts: they buffer lines if their output is not a terminal, and must print the last
        lines. For this reason, do not send SIGQUIT either: Launchpad would then kill the scripts.
        """
        reason = self._report.partition(" ")[2] or "its process was killed or crashed"
        self._print(f"failed: {reason}. Ending the program")
        self._scan()
        send(self._launcher, signal.SIGTERM)
        if self._launcher.pid == 1:  # in a container: `send` skips PID 1, so this launcher does not stop its nodes
            for node in self._others():
                send(node.process, signal.SIGTERM)
        _wait_while(lambda: self._launcher.is_alive and bool(self._others()), GRACE)
        self._scan()
        for node in self._nodes:
            kill_tree(node.process)
        remove_data(self._nodes)
        send(self._launcher, signal.SIGKILL)

    def _end_orphans(self) -> None:
        """After the launcher's death, end all its nodes, including nodes without a guard."""
        nodes = [node for node in self._nodes if node.process.is_alive]
        if nodes:
            self._print("ends because its launcher died")
        for node in nodes:
            send(node.process, signal.SIGTERM)
        _wait_while(lambda: any(node.process.is_alive for node in nodes), GRACE)
        for node in nodes:
            kill_tree(node.process)
        remove_data(self._nodes)

    def _others(self) -> list[Node]:
        return [node for node in nodes_of(self._launcher.pid) if node.process != self._node]

    def _scan(self) -> None:
        """Store the launcher's nodes, because they can no longer be found as its children after its death."""
        self._scanned_at = time.monotonic()
        self._nodes.update(nodes_of(self._launcher.pid))

    def _read_report(self) -> str:
        with contextlib.suppress(BlockingIOError):
            self._report += os.read(self._reports, 4096).decode(errors="replace")
        return self._report

    def _is_stopping_within(self, seconds: float) -> bool:
        _wait_while(lambda: self._stopped_at is None, seconds)
        return self._stopped_at is not None

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the process that reads this output may have died
            print(f"rlframe: the node {self._title} {text}.", flush=True)


def _wait_while(condition: Callable[[], bool], seconds: float) -> None:
    """Sleep while the condition is true, for at most `seconds`."""
    end = time.monotonic() + seconds
    while condition() and time.monotonic() < end:
        time.sleep(_POLL_INTERVAL)


def nodes_of(launcher: int) -> list[Node]:
    """Return the running nodes that the launcher with process id `launcher` has started."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in psutil.Process(launcher).children(recursive=True):
            command = command_of(each.pid)
            if any(part.endswith(ENTRY) for part in command) and not is_wrapper(command):
                found.append(Node(ProcessId.of(each.pid), data_file_of(command)))
    return found


def end_starting_nodes(launcher: int) -> None:
    """Kill each node of the process `launcher` that still ignores SIGTERM, so has not yet imported rlframe.

    No user code runs in a node before this import.
    """
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
    """Kill a process and its descendants. Do nothing for PID 1, because all processes are its descendants."""
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
    """Return True if `command` runs Launchpad's script that puts the node's name before each output line."""
    return any(part.endswith(WRAPPER) for part in command[:3])


def data_file_of(command: list[str]) -> str:
    """Return the path after `--data_file` in a node's command line, or "" if there is no such option."""
    return command[command.index("--data_file") + 1] if "--data_file" in command[:-1] else ""


def command_of(pid: int) -> list[str]:
    """Return the command line of a process, or [] if it has ended."""
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
    """Return the command line arguments for `main`."""
    return [str(each) for each in (*node.process, *launcher, hides_exit_code, node.data_file, title)]


def main() -> None:
    """Run a guard. Its command line is the result of `arguments`. It reads the node's report from stdin."""
    node_pid, node_started, launcher_pid, launcher_started, hides_exit_code, data_file, title = sys.argv[1:]
    node = Node(ProcessId(int(node_pid), int(node_started)), data_file)
    launcher = ProcessId(int(launcher_pid), int(launcher_started))
    guard = Guard(node, launcher, title, hides_exit_code == "True", sys.stdin.fileno())
    signal.signal(signal.SIGTERM, lambda *_: guard.stop())
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guard.run()
