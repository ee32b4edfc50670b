"""The contracts between a supervisor and its nodes: `StartableNode.start` returns a `RunningNode`.

`StartableProcess` and `RunningProcess` implement the contracts for processes on this machine. In such a process,
`node_main.main` runs the node.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from rlframe.engines.group_rules import GroupRules
from rlframe.errors import UsageError
from rlframe.interprocess.heartbeat import HeartbeatMonitor
from rlframe.interprocess.processes import start_process
from rlframe.user_code.directories import import_path

_MAX_LINES = 80  # number of output lines that are kept for each node, because the last lines can contain a traceback

EXIT_PERMANENT = 4  # exit code of a process that would fail again after a restart
STOP_SIGNAL = signal.SIGUSR1  # a node sends this signal to the launcher to end the program, for example in `lp.stop()`
LAUNCHER_PID = "RLFRAME_LAUNCHER_PID"  # environment variable with the launcher's process id, for a node's process


def end_program_of(launcher: int) -> None:
    """End the program of a launcher, given by its process id: send it `STOP_SIGNAL`.

    Raises:
        UsageError: the launcher has no handler, so the signal would kill it.
    """
    status = pathlib.Path(f"/proc/{launcher}/status").read_text()
    caught = int(status.partition("\nSigCgt:")[2].split()[0], 16)  # one bit for each signal, from signal 1 on
    if not caught >> (STOP_SIGNAL - 1) & 1:
        raise UsageError(
            "This node cannot end its program: the program was launched outside the main thread, where Python handles "
            "no signals. Launch the program in the main thread."
        )
    os.kill(launcher, STOP_SIGNAL)


class RunningNode(abc.ABC):
    """A running process of a node, on this or another machine.

    Args:
        name: name of the node.
        heartbeat: the heartbeat of the process; None if the process has no heartbeat.
        take_line: callback (name, line) for each line of output.

    Attributes:
        code: exit code, or the negative number of the signal that killed the process; None while the process runs.
        pid: process id on the node's machine; None if it is unknown.
        host: name of the node's machine.
        serves_at: address at which the process accepts calls; None while it accepts no calls.
        hang_reason: description of the hang if `kill_if_hung` killed the process; otherwise "".
    """

    code: int | None = None
    pid: int | None = None
    host: str = socket.gethostname()
    serves_at: str | None = None

    def __init__(self, name: str, heartbeat: HeartbeatMonitor | None, take_line: Callable[[str, str], None]) -> None:
        self.name, self.heartbeat, self.hang_reason = name, heartbeat, ""
        self.began = time.monotonic()
        self._take_line = take_line
        self._lines: collections.deque[str] = collections.deque(maxlen=_MAX_LINES)

    @abc.abstractmethod
    def send(self, number: int) -> None:
        """Send a signal to the process. Send SIGKILL to all processes of the same session."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Wait until a killed process has ended and its last output lines have been read."""

    def kill_if_hung(self, now: float) -> None:
        """Kill the process if its heartbeat shows that it hangs.

        Args:
            now: seconds on the supervisor's `SuspendAwareClock`.
        """
        if self.heartbeat is not None and not self.hang_reason:
            self.hang_reason = self.heartbeat.problem(now)
            if self.hang_reason:
                self.send(signal.SIGKILL)

    def uptime(self) -> float:
        """Return the seconds since the start, without the seconds in which the process hung."""
        hung = self.heartbeat.stuck if self.heartbeat is not None and self.hang_reason else 0.0
        return time.monotonic() - self.began - hung

    def exit_reason(self) -> str:
        """Return why the process failed, such as "failed with exit code 1"."""
        if self.hang_reason:
            return f"hung: {self.hang_reason}, and was killed"
        assert self.code is not None
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"failed with exit code {self.code}"

    def last_output(self) -> str:
        """Return the process's traceback, or the last lines of its output."""
        lines = list(self._lines)
        starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
        kept = lines[starts[-1] :] if starts else lines[-5:]
        return "" if not kept else " Its last lines:\n" + "\n".join(kept)

    @property
    def last_line(self) -> str:
        """The last non-empty line of output. In a traceback, this line is the error."""
        return next((line for line in reversed(self._lines.copy()) if line.strip()), "")

    def _take(self, text: str) -> None:
        self._lines.append(text)
        self._take_line(self.name, text)


OnExit = Callable[[RunningNode], None]  # callback for the end of a process
TakeLine = Callable[[str, str], None]  # callback (name, line) for each line of output


class StartableNode(Protocol):
    """A node that a `Supervisor` starts and restarts."""

    @property
    def name(self) -> str:
        """The name of the node, such as `actor/1`."""

    @property
    def rules(self) -> GroupRules:
        """The rules of the node's group."""

    def start(self, heartbeat: HeartbeatMonitor | None, on_exit: OnExit, take_line: TakeLine) -> RunningNode:
        """Start the node without waiting. Other threads will call `on_exit` and `take_line`."""


# --- processes on this machine


@dataclasses.dataclass(frozen=True)
class StartableProcess:
    """A node that runs as a process on this machine. See `StartableNode`."""

    name: str  # "actor/1"
    command: Sequence[str]
    rules: GroupRules = dataclasses.field(default_factory=GroupRules)
    # Input for the process. The last argument of the command is the file descriptor of this input.
    content: bytes | None = None
    address: str | None = None  # path of the socket at which the process accepts calls

    @classmethod
    def of(
        cls, name: str, run: Callable[[bytes], Any], pickled: bytes, rules: GroupRules, address: str | None = None
    ) -> StartableProcess:
        """Return a process that will run a pickled node with this process's `sys.path`, without a file on disk.

        Args:
            name: name of the node, such as `actor/1`.
            run: module-level function that runs a node in its process, such as `node_main.run_served_node`.
            pickled: the argument of `run`.
            rules: rules of the node's group.
            address: path of the socket at which the node accepts calls; None if no address is needed.
        """
        rules = dataclasses.replace(rules, env={**rules.env, LAUNCHER_PID: str(os.getpid())})
        code = (
            f"import sys; sys.path[:] = {import_path()!r}; "
            "from rlframe.engines.supervision.node_main import main; main()"
        )
        return cls(name, [sys.executable, "-c", code, name], rules, pickle.dumps((run, pickled)), address)

    def start(self, heartbeat: HeartbeatMonitor | None, on_exit: OnExit, take_line: TakeLine) -> RunningProcess:
        """See `StartableNode`."""
        return RunningProcess(self, heartbeat, on_exit, take_line)


class RunningProcess(RunningNode):
    """A process on this machine, with threads that read its output and wait for its end."""

    def __init__(
        self, node: StartableProcess, heartbeat: HeartbeatMonitor | None, on_exit: OnExit, take_line: TakeLine
    ) -> None:
        super().__init__(node.name, heartbeat, take_line)
        self._address = node.address
        variables = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **node.rules.env,
            **(heartbeat.variables if heartbeat is not None else {}),
        }
        with contextlib.ExitStack() as opened:
            descriptors = [opened.enter_context(_in_memory(node.content))] if node.content is not None else []
            self._process = start_process(
                [*node.command, *map(str, descriptors)],
                env={name: value for name, value in variables.items() if value is not None},
                pass_fds=(*descriptors, *([heartbeat.descriptor] if heartbeat is not None else [])),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C at the terminal reaches only the launcher
            )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, args=(on_exit,), daemon=True).start()

    @property
    def serves_at(self) -> str | None:  # type: ignore[override]
        """See `RunningNode`."""
        return self._address if self._address is not None and os.path.exists(self._address) else None

    def send(self, number: int) -> None:
        """See `RunningNode`."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    def wait(self) -> None:
        """See `RunningNode`. Do not wait for the node's child processes, which may keep the output pipe open."""
        self.code = self._process.wait()
        self._reader.join(1.0)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._take(line.decode(errors="backslashreplace").rstrip("\n"))

    def _wait(self, on_exit: OnExit) -> None:
        self.wait()
        on_exit(self)


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[int]:
    """Write `content` to a file in memory, and yield its descriptor. The kernel frees the file after its last close."""
    descriptor = os.memfd_create("rlframe node")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def program_processes(
    run: Callable[[bytes], Any], nodes: Mapping[str, Sequence[bytes]], rules: Mapping[str, GroupRules]
) -> list[StartableProcess]:
    """Return the processes of a program, for a `ProgramSupervisor`.

    Args:
        run: see `StartableProcess.of`.
        nodes: the pickled nodes of each group.
        rules: rules for each group. A group without rules has no restarts and does not end the program.
    """
    return [
        StartableProcess.of(f"{group}/{i}" if len(pickled) > 1 else group, run, node, rules.get(group, GroupRules()))
        for group, pickled in nodes.items()
        for i, node in enumerate(pickled)
    ]


def pickle_node(group: str, node: Any) -> bytes:
    """Pickle a node of a group. Raise UsageError if it cannot be pickled."""
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(node)
    except UsageError:  # the message already names the invalid argument
        raise
    except Exception as error:
        raise UsageError(
            f"The nodes of the group {group!r} cannot be sent to their processes: {type(error).__name__}: {error}. "
            "Their arguments must be picklable."
        ) from error
    return pickled
