"""Run `rlframe train --topology elastic` as a process, and kill or scale its workers."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil

from rlframe.control.client import ControlClient
from rlframe.errors import PeerError, UnavailableError, UsageError
from tests.programs.running_program import RunningProgram


class ElasticProgram(RunningProgram):
    """A process that runs an elastic program. It also tracks orphaned workers, whose coordinator was killed."""

    def __init__(self, run_dir: pathlib.Path, *arguments: str) -> None:
        super().__init__(run_dir, *arguments, "--topology", "elastic")
        self.versions: list[int] = []  # parameter versions in all statuses, oldest first
        self.env_steps: list[int] = []
        self._workers: dict[int, psutil.Process] = {}

    def __exit__(self, kind: Any, *exc: Any) -> None:
        super().__exit__(kind, *exc)
        if kind is not None:
            for process in self._workers.values():
                if process.is_running():
                    process.kill()

    def status(self) -> dict[str, Any] | None:
        """Return the coordinator's status, or None if the coordinator does not answer."""
        try:
            with ControlClient.of_run(self.run_dir) as client:
                status = client.status()
        except (PeerError, UnavailableError, UsageError):
            return None
        if status.get("stale"):
            return None
        self.versions.append(status["job"]["params_version"])
        self.env_steps.append(status["job"]["env_steps"])
        for worker in status["workers"]:
            if worker["pid"] and worker["pid"] not in self._workers and psutil.pid_exists(worker["pid"]):
                process = psutil.Process(worker["pid"])
                if process.ppid() != os.getpid():  # the run does not end workers that the test started
                    self._workers[worker["pid"]] = self._seen[worker["pid"]] = process
        return status

    def call(self, function: Callable[[ControlClient], Any]) -> Any:
        """Call a function with a client of the coordinator. Retry until the coordinator answers."""
        deadline = time.monotonic() + 120.0
        while True:
            try:
                with ControlClient.of_run(self.run_dir) as client:
                    return function(client)
            except (PeerError, UnavailableError, UsageError):  # the HTTP service or the coordinator is not ready yet
                assert time.monotonic() < deadline, self.errors()
                time.sleep(0.1)

    def wait_for(self, condition: Callable[[dict[str, Any]], Any], seconds: float = 180.0) -> dict[str, Any]:
        """Poll the status until the condition is true, and return that status."""
        found: dict[str, Any] = {}

        def is_true() -> bool:
            status = self.status()
            if status is None or not condition(status):
                return False
            found.update(status)
            return True

        self.wait_until(is_true, seconds)
        return found

    def worker(self, worker_id: str, above: int = -1) -> dict[str, Any]:
        """Wait until the worker is busy with an incarnation greater than `above`. Return its status."""

        def is_busy(status: dict[str, Any]) -> bool:
            return any(
                worker["worker_id"] == worker_id and worker["state"] == "BUSY" and worker["incarnation"] > above
                for worker in status["workers"]
            )

        status = self.wait_for(is_busy)
        return next(worker for worker in status["workers"] if worker["worker_id"] == worker_id)

    def wait_for_collectors(self, count: int) -> None:
        """Wait until exactly `count` collectors are busy."""
        self.wait_for(
            lambda status: (
                [
                    worker["state"] == "BUSY" and worker["env_steps"] > 0
                    for worker in status["workers"]
                    if worker["role"] == "collector" and worker["state"] not in ("LOST", "GONE")
                ]
                == [True] * count
            )
        )

    def scale(self, count: int) -> None:
        """Scale to `count` collectors, and wait until they are busy."""
        self.call(lambda client: client.scale("collector", count))
        self.wait_for_collectors(count)

    def kill_and_wait(self, worker_id: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a worker, and wait until its next incarnation is busy."""
        worker = self.worker(worker_id)
        os.kill(worker["pid"], number)
        self.worker(worker_id, above=worker["incarnation"])

    def kill_coordinator(self) -> None:
        """Kill the coordinator, and wait until the restarted coordinator is running the job."""
        before = self.wait_for(lambda status: status["job"]["state"] == "RUNNING")
        self.kill("coordinator")
        self.wait_for(
            lambda status: (
                status["job"]["coordinator_restarts"] > before["job"]["coordinator_restarts"]
                and status["job"]["state"] == "RUNNING"
            )
        )

    def check_counters(self, status: dict[str, Any]) -> None:
        """Check that no counter decreased, and that granted items are equal to learned, dropped and lost items."""
        assert self.versions == sorted(self.versions)
        assert self.env_steps == sorted(self.env_steps)
        accounts, replay = status["accounts"], status["replay"]
        assert accounts["learned"] > 0
        assert accounts["granted"] == accounts["learned"] + accounts["dropped"] + accounts["lost"]
        consumed = replay["sampled"] if replay["kind"] == "queue" else 0
        assert replay["added"] == replay["items"] + replay["evicted"] + consumed


def last_status(run_dir: pathlib.Path) -> dict[str, Any]:
    """Return the status that the coordinator wrote at the end of the job."""
    return json.loads((run_dir / "coordinator" / "status.json").read_text())
