"""Workers as processes of this machine: the default."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import TextIO

from rlframe.coordinator.messages import ROLES, WorkerInfo, WorkerKey
from rlframe.coordinator.operators.base import OperatorError
from rlframe.coordinator.workers.process import CLOSING, SILENCE, Life, command
from rlframe.coordinator.workers.records import Records, record_of, this_host
from rlframe.engines.launching.placement import ON_CPU
from rlframe.engines.launching.running import FOR_GOOD
from rlframe.engines.logs import show
from rlframe.interprocess.processes import ProcessId
from rlframe.transport import Transport
from rlframe.transport.sockets import SocketTransport

_AT_ONCE = 1 << 16  # bytes of one log per look, so that one that says much does not hold up the others

WorkerEnv = Mapping[str, str | None]  # environment variables; None: not to be there

# The accelerators, and more than one thread, are the learner's.
ENV: Mapping[str, WorkerEnv] = {role: {} if role == "learner" else ON_CPU for role in ROLES}


class LocalOperator:
    """Spawns workers (see `rlframe.coordinator.workers.process`) and ends them. See `Operator`.

    The processes outlive the one that spawned them: another operator with the same `state_dir` adopts them, by their
    records there. They end with `owner`, or when nobody has called them for `silence` seconds. What they write goes to
    `ROLE-INDEX.log`, and from there to `output`. They are called over sockets that only their user can reach.

    Args:
        state_dir: a directory of the run, in which `save_workers` has written what makes the workers.
        env: by role, environment variables beside this process's own (None: without it); a role that is missing has
            those of `ENV`.
        owner: the process whose end is the end of the workers; None: none is.
        silence: seconds without a call after which a worker ends.
        output: where the workers' lines go; stderr.
        logs: the directory in which they are kept; None: `state_dir/logs`.
    """

    transport: Transport = SocketTransport()
    every = 0.1
    grace = CLOSING + 2.0  # a worker that cannot close ends itself before

    def __init__(
        self,
        state_dir: str | os.PathLike[str],
        *,
        env: Mapping[str, WorkerEnv] | None = None,
        owner: ProcessId | None = None,
        silence: float = SILENCE,
        output: TextIO | None = None,
        logs: pathlib.Path | None = None,
    ) -> None:
        self._state_dir, self._life, self._env = pathlib.Path(state_dir), Life(owner, silence), {**ENV, **(env or {})}
        self._records = Records(state_dir)
        self._log_dir = logs or self._state_dir / "logs"
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._output = output if output is not None else sys.stderr
        self._tails: dict[str, LogTail] = {}  # by worker_id
        self._children: dict[WorkerKey, _Child] = {}
        self._told: set[WorkerKey] = set()  # to end

    def list(self) -> list[WorkerInfo]:
        """See `Operator`. Shows what the workers have written as well."""
        self._show_logs()
        records = {key: child.record for key, child in self._children.items()}
        records |= {record.key: record for record in self._records.all()}
        return [self._seen(record) for record in records.values()]

    def start(self, worker: WorkerInfo) -> None:
        """See `Operator`."""
        self._follow(worker)
        arguments = command(self._state_dir, worker.role, worker.index, worker.incarnation, self._life)
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", **self._env[worker.role]}
        try:
            with open(self._log_file(worker), "ab") as log:
                popen = subprocess.Popen(
                    arguments,
                    env={name: value for name, value in variables.items() if value is not None},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # so that it can be killed with what it started
                )
        except OSError as error:
            raise OperatorError(f"{worker.worker_id} could not be started: {error}.") from error
        record = record_of(worker.role, worker.index, worker.incarnation, ProcessId.of(popen.pid))
        self._children[worker.key] = _Child(popen, record)
        self._records.write(record)  # it may have done so itself by now; if it has not, it is found by this one

    def stop(self, worker: WorkerInfo, kill: bool) -> None:
        """See `Operator`."""
        key = worker.key
        if not (worker.has_ended or kill):
            if key not in self._told:
                self._told.add(key)
                _signal(worker, signal.SIGTERM)
                _signal(worker, signal.SIGCONT)  # one that was stopped would not hear of it
            return
        if worker.has_ended and worker.problem and key not in self._told:
            self._show_logs()  # before this line
            problem = worker.problem.removeprefix(f"{worker.worker_id} ")
            show(self._output, worker.worker_id, f"(incarnation {worker.incarnation}) {problem}")
        self._told.add(key)
        _kill_session(worker)
        child = self._children.get(key)
        if child is not None and child.popen.poll() is None:
            return  # it is killed, and not gone yet
        if not worker.process.is_alive or worker.host != this_host():
            self._children.pop(key, None)
            self._told.discard(key)
            self._records.remove(worker)

    def close(self) -> None:
        """See `Operator`."""
        self._show_logs()

    def _log_file(self, worker: WorkerInfo) -> pathlib.Path:
        return self._log_dir / f"{worker.role}-{worker.index}.log"

    def _follow(self, worker: WorkerInfo) -> LogTail:
        """What shows the worker's log, from its first call on."""
        if worker.worker_id not in self._tails:
            self._tails[worker.worker_id] = LogTail(worker.worker_id, self._log_file(worker), self._output)
        return self._tails[worker.worker_id]

    def _show_logs(self) -> None:
        for tail in self._tails.values():
            tail.show()

    def _seen(self, record: WorkerInfo) -> WorkerInfo:
        self._follow(record)
        child = self._children.get(record.key)
        # A process that runs no more may still have threads that do: how it ended is not known before they are gone.
        is_ending = child is not None and _exit_code(child.popen) is None
        if record.host == this_host() and (record.process.is_alive or is_ending):
            return record
        return dataclasses.replace(record, has_ended=True, problem=self._how_it_ended(record))

    def _how_it_ended(self, info: WorkerInfo) -> str:
        child = self._children.get(info.key)
        # Left a zombie until `end` has killed its session: as long as it is one, nobody else has its number.
        code = None if child is None else _exit_code(child.popen)
        tail = self._follow(info)
        tail.show()
        words = tail.last_line
        said = f" Its last line: {words}" if words else ""
        if code is None:
            return f"{info.worker_id} ended.{said}"
        if code == 0:
            return f"{info.worker_id} ended by itself.{said}"
        if code < 0:
            return f"{info.worker_id} was killed by {signal.Signals(-code).name}."
        again = " It would fail again." if code == FOR_GOOD else ""
        return f"{info.worker_id} failed with exit code {code}.{again}{said}"


@dataclasses.dataclass
class _Child:
    """A process that this one spawned, and has not waited for."""

    popen: subprocess.Popen[bytes]
    record: WorkerInfo


def _exit_code(popen: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a process without reaping it; negative: the signal that killed it; None: it runs."""
    if popen.returncode is not None:
        return popen.returncode
    try:
        result = os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # somebody else has: how it ended is not known
        return popen.poll()
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _signal(worker: WorkerInfo, number: int) -> None:
    if worker.host == this_host() and worker.process.is_alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, number)


def _kill_session(worker: WorkerInfo) -> None:
    """Kills a worker with all that it started, or what is left of them; not who has its number by now."""
    now = ProcessId.of(worker.process.pid)
    if worker.host == this_host() and now.started in (-1, worker.started):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(now.pid, signal.SIGKILL)


class LogTail:
    """Copies what is appended to a file to a stream, from now on, each line behind the name of who wrote it.

    Args:
        name: of the worker that writes to the file.
        path: of the file, which may have yet to be made.
        output: where the lines go.

    Attributes:
        last_line: that was shown; of a traceback, the error.
    """

    def __init__(self, name: str, path: pathlib.Path, output: TextIO) -> None:
        self._name, self._path, self._output = name, path, output
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""
        self.last_line = ""

    def show(self) -> None:
        """Shows the whole lines that were appended since."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                new = file.read(_AT_ONCE)
        except OSError:
            return
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for text in (line.decode(errors="backslashreplace") for line in lines):
            show(self._output, self._name, text)
            self.last_line = text if text.strip() else self.last_line
