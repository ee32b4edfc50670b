"""A queue of elastic runs, one after the other, each a process that outlives the one that queues.

The queue is a file, written before what it says is done. A service that was killed finds by it the run that goes on
without it; a run that died itself is started again, from its checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from rlframe.coordinator.control.address import control_file, read_last_status, status_file
from rlframe.coordinator.control.client import ControlClient
from rlframe.coordinator.control.errors import ConflictError, NotFoundError
from rlframe.coordinator.states import JobState
from rlframe.errors import RlframeError, UsageError
from rlframe.interprocess.processes import ProcessId

State = Literal["queued", "running", "stopping", "done", "failed", "cancelled"]
ACTIVE: tuple[State, ...] = ("running", "stopping")

MAX_SESSIONS = 5  # processes that one job may have, one after the other died
MAX_QUEUED = 1000
_STEP = 0.2  # seconds between two looks at the process
_DRAIN, _TERMINATE = 180.0, 30.0  # seconds for a run that was told to stop, and then for SIGTERM
_INTERRUPTED = (129, 130, 143)  # exit codes of a run that SIGHUP, SIGINT or SIGTERM ended: it has saved

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Job:
    """A run that was submitted.

    Attributes:
        number: from 1; rises with every job.
        what: agent and env, for a reader.
        run_dir: where everything of it is.
        reason: why it is in its state.
        sessions: processes that it has had.
        pid, started: of its process, the last one (see `ProcessId`).
        told_at: when it was told to stop (unix s).
        is_terminated: whether it got SIGTERM.
    """

    number: int
    what: dict[str, str]
    run_dir: str
    state: State = "queued"
    reason: str = ""
    submitted: float = 0.0
    began: float | None = None
    ended: float | None = None
    sessions: int = 0
    pid: int = 0
    started: int = -1
    told_at: float | None = None
    is_terminated: bool = False

    @property
    def id(self) -> str:
        return f"job-{self.number:04d}"

    def view(self) -> dict[str, Any]:
        """What clients see."""
        values = dataclasses.asdict(self)
        for hidden in ("number", "started", "told_at", "is_terminated", "what"):
            del values[hidden]
        return {"id": self.id, **self.what, **values}


# (job, the file that `rlframe train --config` takes, whether to go on from its checkpoint) -> command line
Command = Callable[[Job, pathlib.Path, bool], list[str]]


def train_command(job: Job, config: pathlib.Path, resume: bool) -> list[str]:
    """The command that runs a job: the one place that knows it."""
    described = ["--resume"] if resume else ["--config", str(config)]
    return [
        *(sys.executable, "-m", "rlframe", "train", *described, "--http", "0"),
        *("--run-dir", job.run_dir, "--quiet", "--json"),
    ]


class JobQueue:
    """Runs jobs one after the other, between `start` and `close`. Any thread may call it.

    Args:
        folder: holds the queue's file, and the directories and output of its runs. One queue at a time has it.
        command: gives the command line of a job.

    Raises:
        UsageError: another service has the folder, or what is in it is no queue.
    """

    def __init__(self, folder: str | os.PathLike, command: Command = train_command) -> None:
        self._folder = pathlib.Path(folder).absolute()
        self._file = self._folder / "jobs.json"
        self._command = command
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None  # where the process was started by this queue
        self._asked: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="rlframe jobs", daemon=True)
        try:
            for made in (self._folder, self._folder / "logs", self._folder / "configs"):
                made.mkdir(parents=True, exist_ok=True)
            self._held = open(self._folder / "jobs.lock", "w")  # noqa: SIM115
        except OSError as error:
            raise UsageError(f"Jobs cannot be kept in {self._folder}: {error.strerror}.") from error
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._held.close()
            raise UsageError(
                f"Another `rlframe serve coordinator` has the jobs in {self._folder}. End it, or name another --runs."
            ) from error
        self._jobs = self._load()

    def start(self) -> None:
        """Begins to run jobs; adopts the one that a service before this one had begun."""
        self._thread.start()

    def close(self) -> None:
        """Runs no more jobs. The one that runs goes on, for the next service to adopt."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._held.close()

    # What may be asked for

    def submit(self, what: dict[str, str], config: str) -> dict[str, Any]:
        """Puts a run at the queue's end.

        Args:
            what: agent and env.
            config: what its `--config` file holds.
        """
        with self._lock:
            if sum(job.state == "queued" for job in self._jobs) >= MAX_QUEUED:
                raise ConflictError(f"{MAX_QUEUED} jobs wait already. Cancel some, or submit this one later.")
            number = self._jobs[-1].number + 1 if self._jobs else 1
            job = Job(number, what, "", submitted=time.time())
            job.run_dir = str(self._folder / job.id)
            self._config(job).write_text(config)
            self._jobs.append(job)
            self._save()
            return job.view()

    def jobs(self) -> list[dict[str, Any]]:
        """All of them, in the order in which they were submitted."""
        with self._lock:
            return [job.view() for job in self._jobs]

    def job(self, name: str) -> dict[str, Any]:
        """The one with this id. Raises `NotFoundError`."""
        with self._lock:
            return self._find(name).view()

    def running(self) -> Job | None:
        """The one that runs, as it was at this moment."""
        with self._lock:
            found = self._running()
            return None if found is None else dataclasses.replace(found)

    def cancel(self, name: str, reason: str = "") -> dict[str, Any]:
        """Takes a job out of the queue, or has the one that runs end in good order.

        Raises:
            NotFoundError: there is no such job.
            ConflictError: it is over.
        """
        with self._lock:
            job = self._find(name)
            if job.state == "queued":
                self._end(job, "cancelled", reason)
            elif job.state == "running":
                job.state, job.reason, job.told_at = "stopping", reason, time.time()
                self._save()
            elif job.state != "stopping":
                raise ConflictError(f"{job.id} is over: {job.state}.")
            return job.view()

    # One job after the other

    def _run(self) -> None:
        while not self._stop.wait(_STEP):
            try:
                self._step()
            except Exception:  # a full disk: the queue goes on when there is room
                _log.exception("The queue of jobs could not go on just now.")

    def _step(self) -> None:
        with self._lock:
            job = self._running()
            if job is None:
                waiting = next((one for one in self._jobs if one.state == "queued"), None)
                if waiting is not None:
                    self._begin(waiting, resume=False)
            elif not self._is_alive(job):
                self._settle(job)
            elif job.state == "stopping":
                self._press(job)

    def _begin(self, job: Job, resume: bool) -> None:
        run_dir = pathlib.Path(job.run_dir)
        resume = resume and (run_dir / "config.json").is_file()
        if not resume and run_dir.exists():  # it died before it had begun
            shutil.rmtree(run_dir)
        for written in (control_file(run_dir), status_file(run_dir), run_dir / "result.json"):
            written.unlink(missing_ok=True)  # of the session before: what is there later is this one's
        job.state, job.sessions, job.pid, job.started = "running", job.sessions + 1, 0, -1
        job.began = job.began or time.time()
        self._save()  # before there is a process: one that nobody knows of would go on for ever
        with open(self._output(job), "ab") as output:
            self._child = subprocess.Popen(
                self._command(job, self._config(job), resume),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # it outlives this process, and Ctrl-C in its terminal
            )
        known = ProcessId.of(self._child.pid)
        job.pid, job.started = known.pid, known.started
        self._save()
        _log.info("%s runs (process %d).", job.id, job.pid)

    def _is_alive(self, job: Job) -> bool:
        if self._child is not None and self._child.pid == job.pid:
            return self._child.poll() is None
        return ProcessId(job.pid, job.started).is_alive

    def _settle(self, job: Job) -> None:
        """Its process has ended: what has become of the job."""
        code = self._child.returncode if self._child is not None and self._child.pid == job.pid else None
        self._child = None
        if job.state == "stopping":
            self._end(job, "cancelled", job.reason)
        elif code == 0 or (code is None and _has_result(job)):
            self._end(job, "done", "")
        elif (failure := _failure(job)) is not None:
            self._end(job, "failed", failure)
        elif code is not None and code > 0 and code not in _INTERRUPTED:
            self._end(job, "failed", self._last_line(job) or f"it ended with the exit code {code}")
        elif job.sessions >= MAX_SESSIONS:
            self._end(job, "failed", f"its process died {MAX_SESSIONS} times. {self._last_line(job)}".strip())
        else:
            _log.warning("%s: its process %d died; it is started again.", job.id, job.pid)
            self._begin(job, resume=True)

    def _press(self, job: Job) -> None:
        """Has a run end that was told to: asks it, again and again; then less kindly."""
        assert job.told_at is not None
        waited = time.time() - job.told_at
        if waited > _DRAIN + _TERMINATE:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
        elif waited > _DRAIN:
            if not job.is_terminated:  # a second SIGTERM would end the run before it has saved
                job.is_terminated = True
                self._save()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(job.pid, signal.SIGTERM)
        elif self._asked is None or not self._asked.is_alive():  # beside the queue: it may take seconds
            self._asked = threading.Thread(target=self._ask_to_stop, args=(job.run_dir, job.reason), daemon=True)
            self._asked.start()

    def _ask_to_stop(self, run_dir: str, reason: str) -> None:
        with contextlib.suppress(RlframeError), ControlClient.of_run(run_dir) as client:  # it has no control yet; again
            client.cancel(reason)
        self._stop.wait(1.0)

    def _end(self, job: Job, state: State, reason: str) -> None:
        job.state, job.reason, job.ended = state, reason, time.time()
        self._save()
        _log.info("%s is %s. %s", job.id, state, reason)

    # The file

    def _load(self) -> list[Job]:
        if not self._file.exists():
            return []
        try:
            return [Job(**one) for one in json.loads(self._file.read_text())["jobs"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._held.close()
            raise UsageError(
                f"{self._file} is no queue of jobs: {error}. Name another --runs, or remove it."
            ) from error

    def _save(self) -> None:
        temporary = self._file.with_suffix(".tmp")
        with open(temporary, "w") as file:
            json.dump({"jobs": [dataclasses.asdict(job) for job in self._jobs]}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._file)

    def _find(self, name: str) -> Job:
        for job in self._jobs:
            if job.id == name:
                return job
        raise NotFoundError(f"There is no job {name[:50]!r}. GET /jobs lists those that there are.")

    def _running(self) -> Job | None:
        return next((job for job in self._jobs if job.state in ACTIVE), None)

    def _config(self, job: Job) -> pathlib.Path:
        return self._folder / "configs" / f"{job.id}.json"

    def _output(self, job: Job) -> pathlib.Path:
        return self._folder / "logs" / f"{job.id}.log"

    def _last_line(self, job: Job) -> str:
        with contextlib.suppress(OSError):
            lines = self._output(job).read_bytes()[-4096:].decode(errors="replace").strip().splitlines()
            return lines[-1].removeprefix("rlframe: ")[:1000] if lines else ""
        return ""


def _failure(job: Job) -> str | None:
    """Why its last session failed, as its coordinator wrote down; None where it did not, or died before it could.

    The exit code of a run that was adopted is unknown: this tells an error of its own from a process that was killed.
    """
    told = (read_last_status(job.run_dir) or {}).get("job", {})
    if told.get("state") != JobState.FAILED.value:
        return None
    return str(told.get("reason") or "it failed")[:1000]


def _has_result(job: Job) -> bool:
    """Whether its last session came to its end, and not to that of a signal, which leaves a result too."""
    try:
        result = json.loads((pathlib.Path(job.run_dir) / "result.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(result, dict) and result.get("signal") is None
