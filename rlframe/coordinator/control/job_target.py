"""The coordinator of whichever job of a queue runs: what the control API of `rlframe serve coordinator` calls."""

from __future__ import annotations

import pathlib
import threading
from typing import Any

from rlframe.coordinator.control.address import control_file, read_control
from rlframe.coordinator.control.client import ControlClient
from rlframe.coordinator.control.errors import ConflictError
from rlframe.coordinator.control.jobs import Job, JobQueue
from rlframe.coordinator.control.submission import read_submission
from rlframe.http.token_file import read_token

_NUMBERS = 10**9  # events of one job: those of the next one begin above, so that numbers rise
_SHOWN = 50  # jobs in a status: the newest
_TIMEOUT = 5.0  # seconds for an answer of the run's own control


class JobTarget:
    """Has a coordinator's methods. A `submit` is a new job of the queue; all else goes to the one that runs.

    Args:
        queue: of jobs.
    """

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue
        self._lock = threading.Lock()
        self._client: tuple[tuple[int, int, int], ControlClient] | None = None

    def status(self) -> dict[str, Any]:
        """The running job's, with `jobs`: the newest of the queue. `job` is None where none runs."""
        job = self._queue.running()
        jobs = {"jobs": self._queue.jobs()[-_SHOWN:]}
        if job is None:
            return {"job": None, **jobs}
        client = self._client_of(job)
        if client is None:
            return {"job": _beginning(job), "workers": [], "tasks": [], **jobs}
        return {**client.status(), **jobs}

    def events(self, since: int, timeout: float = 0.0) -> list[dict[str, Any]]:
        """Of the running job, each with its `job`."""
        job = self._queue.running()
        client = None if job is None else self._client_of(job)
        if job is None or client is None:
            return []
        of, number = divmod(since, _NUMBERS)
        told = client.events(number if of == job.number else 0)
        return [{**one, "number": job.number * _NUMBERS + one["number"], "job": job.id} for one in told]

    def submit(self, spec: dict[str, Any]) -> dict[str, Any]:
        """A job, at the end of the queue."""
        return self._queue.submit(*read_submission(spec))

    def cancel(self, reason: str = "") -> None:
        """Ends the job that runs; the next one begins."""
        self._queue.cancel(self._running().id, reason)

    def pause(self) -> Any:
        """As `Coordinator.pause`."""
        return self._control().pause()

    def resume(self) -> Any:
        """As `Coordinator.resume`."""
        return self._control().resume()

    def scale(self, role: str, n: int) -> Any:
        """As `Coordinator.scale`."""
        return self._control().scale(role, n)

    def evaluate_now(self) -> Any:
        """As `Coordinator.evaluate_now`."""
        return self._control().evaluate_now()

    def checkpoint(self) -> Any:
        """As `Coordinator.checkpoint`."""
        return self._control().checkpoint()

    def restore(self) -> Any:
        """As `Coordinator.restore`."""
        return self._control().restore()

    def _running(self) -> Job:
        job = self._queue.running()
        if job is None:
            raise ConflictError("No job runs. POST /submit hands one in.")
        return job

    def _control(self) -> ControlClient:
        job = self._running()
        client = self._client_of(job)
        if client is None:
            raise ConflictError(f"{job.id} begins: it has no control yet. Ask again in some seconds.")
        return client

    def _client_of(self, job: Job) -> ControlClient | None:
        """None where the run has not written where its control is."""
        try:
            written = control_file(pathlib.Path(job.run_dir)).stat()
        except OSError:
            return None
        key = (job.number, written.st_ino, written.st_mtime_ns)
        with self._lock:
            if self._client is None or self._client[0] != key:
                known = read_control(job.run_dir)
                self._client = key, ControlClient(known.url, read_token(known.token_file), timeout=_TIMEOUT)
            return self._client[1]


def _beginning(job: Job) -> dict[str, Any]:
    """The status of a job whose processes start."""
    return {
        "id": job.id,
        "state": "INIT",
        "reason": "Its processes start." if job.sessions < 2 else "Its process died and is started again.",
        "run_dir": job.run_dir,
        "agent": job.what["agent"],
        "env": job.what["env"],
        "began": job.began,
    }
