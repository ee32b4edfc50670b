"""`rlframe train --topology elastic` as a process, and what can be done to its workers."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil

from rlframe.coordinator.control.client import ControlClient
from rlframe.errors import PeerError, UnavailableError, UsageError
from tests.programs.running_program import RunningProgram


class ElasticProgram(RunningProgram):
    """A run under a coordinator. Its workers outlive the coordinator, so they are not all its descendants."""

    def __init__(self, run_dir: pathlib.Path, *arguments: str) -> None:
        super().__init__(run_dir, *arguments, "--topology", "elastic")
        self.versions: list[int] = []  # and counters, as they were seen one after another
        self.env_steps: list[int] = []
        self._workers: dict[int, psutil.Process] = {}

    def __exit__(self, kind: Any, *exc: Any) -> None:
        super().__exit__(kind, *exc)
        if kind is not None:
            for process in self._workers.values():
                if process.is_running():
                    process.kill()

    def status(self) -> dict[str, Any] | None:
        """What its coordinator says; None while that does not answer."""
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
                if process.ppid() != os.getpid():  # those that the test itself started outlive the run
                    self._workers[worker["pid"]] = self._seen[worker["pid"]] = process
        return status

    def ask(self, what: Callable[[ControlClient], Any]) -> Any:
        """Has the coordinator do something, once it answers."""
        deadline = time.monotonic() + 120.0
        while True:
            try:
                with ControlClient.of_run(self.run_dir) as client:
                    return what(client)
            except (PeerError, UnavailableError, UsageError):  # its control has not begun, or the coordinator is away
                assert time.monotonic() < deadline, self.errors()
                time.sleep(0.1)

    def wait_for(self, condition: Callable[[dict[str, Any]], Any], seconds: float = 180.0) -> dict[str, Any]:
        """Waits for a status of which the condition holds, and returns it."""
        found: dict[str, Any] = {}

        def holds() -> bool:
            status = self.status()
            if status is None or not condition(status):
                return False
            found.update(status)
            return True

        self.wait_until(holds, seconds)
        return found

    def worker(self, worker_id: str, above: int = -1) -> dict[str, Any]:
        """The worker, once an incarnation above that one is at work."""

        def is_at_work(status: dict[str, Any]) -> bool:
            return any(
                worker["worker_id"] == worker_id and worker["state"] == "BUSY" and worker["incarnation"] > above
                for worker in status["workers"]
            )

        status = self.wait_for(is_at_work)
        return next(worker for worker in status["workers"] if worker["worker_id"] == worker_id)

    def wait_for_collectors(self, count: int) -> None:
        """Waits until so many, and no more, are at work."""
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
        """Has so many collectors, and waits until they are at work."""
        self.ask(lambda client: client.scale("collector", count))
        self.wait_for_collectors(count)

    def kill_and_wait(self, worker_id: str, number: int = signal.SIGKILL) -> None:
        """Signals a worker, and waits for the one that takes its place."""
        struck = self.worker(worker_id)
        os.kill(struck["pid"], number)
        self.worker(worker_id, above=struck["incarnation"])

    def kill_coordinator(self) -> None:
        """Kills the coordinator, and waits until its successor has the learner and the collectors it had."""
        before = self.wait_for(lambda status: status["job"]["state"] == "RUNNING")
        self.kill("coordinator")
        self.wait_for(
            lambda status: (
                status["job"]["coordinator_restarts"] > before["job"]["coordinator_restarts"]
                and status["job"]["state"] == "RUNNING"
            )
        )

    def check_counters(self, status: dict[str, Any]) -> None:
        """What holds of a run whatever became of its workers: nothing went back, and the accounts are exact."""
        assert self.versions == sorted(self.versions)
        assert self.env_steps == sorted(self.env_steps)
        accounts, replay = status["accounts"], status["replay"]
        assert accounts["learned"] > 0
        assert accounts["granted"] == accounts["learned"] + accounts["dropped"] + accounts["lost"]
        consumed = replay["sampled"] if replay["kind"] == "queue" else 0
        assert replay["added"] == replay["items"] + replay["evicted"] + consumed


def last_status(run_dir: pathlib.Path) -> dict[str, Any]:
    """What the coordinator wrote down when its job was over."""
    return json.loads((run_dir / "coordinator" / "status.json").read_text())
