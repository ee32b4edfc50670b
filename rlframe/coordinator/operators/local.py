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

from rlframe.coordinator.messages import ROLES
from rlframe.coordinator.operators.base import OperatorError, WorkerInfo, WorkerKey
from rlframe.coordinator.operators.logs import LogTail
from rlframe.coordinator.operators.reconcile import Backoff, End, Health, Seen, Start
from rlframe.coordinator.operators.reconciling import ReconcilingOperator
from rlframe.coordinator.workers.process import CLOSING, SILENCE, Life, command
from rlframe.coordinator.workers.records import Record, Records, this_host
from rlframe.engines.launching.launcher import ON_CPU
from rlframe.engines.launching.supervisor import FOR_GOOD
from rlframe.interprocess.processes import ProcessId

_EVERY = 0.1  # seconds between two looks at the processes
_GRACE = CLOSING + 2.0  # seconds from SIGTERM to SIGKILL: a worker that cannot close ends itself before

WorkerEnv = Mapping[str, str | None]  # environment variables; None: not to be there

# The accelerators, and more than one thread, are the learner's.
ENV: Mapping[str, WorkerEnv] = {role: {} if role == "learner" else ON_CPU for role in ROLES}


class LocalOperator(ReconcilingOperator):
    """Spawns workers (see `rlframe.coordinator.workers.process`), replaces the dead, and ends them.

    The processes outlive the one that spawned them: another operator with the same `state_dir` adopts them. They end
    with `owner`, or when nobody has called them for `silence` seconds. What they write goes to
    `ROLE-INDEX.log`, and from there to `output`.

    Args:
        state_dir: a directory of the run, in which `save_workers` has written what makes the workers.
        env: by role, environment variables beside this process's own (None: without it); a role that is missing has
            those of `ENV`.
        owner: the process whose end is the end of the workers; None: none is.
        silence: seconds without a call after which a worker ends.
        backoff: between the deaths of a worker that does not stay up.
        output: where the workers' lines go; stderr.
        logs: the directory in which they are kept; None: `state_dir/logs`.
    """

    def __init__(
        self,
        state_dir: str | os.PathLike[str],
        *,
        env: Mapping[str, WorkerEnv] | None = None,
        owner: ProcessId | None = None,
        silence: float = SILENCE,
        backoff: Backoff | None = None,
        output: TextIO | None = None,
        logs: pathlib.Path | None = None,
    ) -> None:
        self.transport.check("LocalOperator")
        directory, life, env = pathlib.Path(state_dir), Life(owner, silence), {**ENV, **(env or {})}
        super().__init__(
            lambda: _Processes(
                directory, life, env, output if output is not None else sys.stderr, logs or directory / "logs"
            ),
            state_dir,
            roles=tuple(env),
            every=_EVERY,
            backoff=backoff,
            grace=_GRACE,
        )


@dataclasses.dataclass
class _Child:
    """A process that this one spawned, and has not waited for."""

    popen: subprocess.Popen[bytes]
    record: Record


class _Processes:
    """The backend: processes, known by their records on disk, or because they are this process's children."""

    def __init__(
        self, state_dir: pathlib.Path, life: Life, env: Mapping[str, WorkerEnv], output: TextIO, logs: pathlib.Path
    ):
        self._state_dir, self._life, self._env = state_dir, life, env
        self._records = Records(state_dir)
        self._log_dir = logs
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._tail = LogTail(output)
        self._children: dict[WorkerKey, _Child] = {}
        self._told: set[WorkerKey] = set()  # to end

    def observe(self) -> list[Seen]:
        """See `Backend.observe`."""
        records = {key: child.record for key, child in self._children.items()}
        records |= {(record.worker_id, record.incarnation): record for record in self._records.all()}
        return [self._seen(record) for record in records.values()]

    def start(self, start: Start) -> None:
        """See `Backend.start`."""
        path = self._log_dir / f"{start.role}-{start.index}.log"
        self._tail.follow(start.worker_id, path)
        arguments = command(self._state_dir, start.role, start.index, start.incarnation, self._life)
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", **self._env[start.role]}
        try:
            with open(path, "ab") as log:
                popen = subprocess.Popen(
                    arguments,
                    env={name: value for name, value in variables.items() if value is not None},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # so that it can be killed with what it started
                )
        except OSError as error:
            raise OperatorError(f"{start.worker_id} could not be started: {error}.") from error
        process = ProcessId.of(popen.pid)
        record = Record(start.role, start.index, start.incarnation, process.pid, process.started, this_host())
        self._children[start.worker_id, start.incarnation] = _Child(popen, record)
        self._records.write(record)  # it may have done so itself by now; if it has not, it is found by this one

    def end(self, end: End) -> None:
        """See `Backend.end`."""
        info, key = end.seen.info, end.seen.info.key
        record = self._record(key)
        if record is None:
            return
        if end.seen.health is not Health.DEAD and not end.kill:
            if key not in self._told:
                self._told.add(key)
                _signal(record, signal.SIGTERM)
                _signal(record, signal.SIGCONT)  # one that was stopped would not hear of it
            return
        if end.seen.health is Health.DEAD and end.seen.problem and key not in self._told:
            self._tail.last_words(info.worker_id)  # before this line
            problem = end.seen.problem.removeprefix(f"{info.worker_id} ")
            self._tail.say(info.worker_id, f"(incarnation {info.incarnation}) {problem}")
        self._told.add(key)
        _kill_session(record)
        child = self._children.get(key)
        if child is not None and child.popen.poll() is None:
            return  # it is killed, and not gone yet
        if not record.process.is_alive or record.host != this_host():
            self._children.pop(key, None)
            self._told.discard(key)
            self._records.remove(record)

    def close(self) -> None:
        """See `Backend.close`."""
        self._tail.close()

    def _record(self, key: WorkerKey) -> Record | None:
        if key in self._children:
            return self._children[key].record
        found = (record for record in self._records.all() if (record.worker_id, record.incarnation) == key)
        return next(found, None)

    def _seen(self, record: Record) -> Seen:
        self._tail.follow(record.worker_id, self._log_dir / f"{record.role}-{record.index}.log")
        info = WorkerInfo(
            record.worker_id,
            record.role,
            record.index,
            record.incarnation,
            record.address,
            record.host,
            record.pid,
        )
        child = self._children.get(info.key)
        if record.host == this_host() and (record.process.is_alive or (child is not None and _is_ending(child.popen))):
            return Seen(info)
        return Seen(info, Health.DEAD, self._how_it_ended(info))

    def _how_it_ended(self, info: WorkerInfo) -> str:
        child = self._children.get(info.key)
        # Left a zombie until `end` has killed its session: as long as it is one, nobody else has its number.
        code = None if child is None else _exit_code(child.popen)
        words = self._tail.last_words(info.worker_id)
        said = f" Its last line: {words}" if words else ""
        if code is None:
            return f"{info.worker_id} ended.{said}"
        if code == 0:
            return f"{info.worker_id} ended by itself.{said}"
        if code < 0:
            return f"{info.worker_id} was killed by {signal.Signals(-code).name}."
        again = " It would fail again." if code == FOR_GOOD else ""
        return f"{info.worker_id} failed with exit code {code}.{again}{said}"


def _is_ending(popen: subprocess.Popen[bytes]) -> bool:
    """Whether a process that runs no more still has threads that do: how it ended is not known before they are gone."""
    try:
        return popen.returncode is None and os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _exit_code(popen: subprocess.Popen[bytes]) -> int | None:
    """How a process ended that is not waited for yet; negative: the signal that killed it."""
    if popen.returncode is not None:
        return popen.returncode
    with contextlib.suppress(ChildProcessError):
        result = os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is not None:
            return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
    return None


def _signal(record: Record, number: int) -> None:
    if record.host == this_host() and record.process.is_alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, number)


def _kill_session(record: Record) -> None:
    """Kills a worker with all that it started, or what is left of them; not who has its number by now."""
    now = ProcessId.of(record.pid)
    if record.host == this_host() and now.started in (-1, record.started):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(record.pid, signal.SIGKILL)
