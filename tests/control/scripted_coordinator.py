"""A fake coordinator without workers, for tests of the control API, the page and the command line."""

from __future__ import annotations

import threading
import time
from typing import Any

from rlframe.coordinator.config import CoordinatorConfig
from rlframe.coordinator.states import JobState, is_over
from rlframe.errors import UsageError

MIN_ACTORS, MAX_ACTORS = 1, 8


class ScriptedCoordinator:
    """A fake coordinator. The test sets the state of its job, and commands change it as in a real coordinator.

    Attributes:
        calls: Commands that were called, with their arguments.
        asked: Number of calls of `status`.
        evaluates: True while an evaluation is in progress.
        away: Exception that every method raises while it is set.
        gate: Event that every method waits for. Clear it to simulate a coordinator that hangs.
    """

    def __init__(self, collectors: int = 2) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.asked = 0
        self.away: Exception | None = None
        self.evaluates = False
        self.gate = threading.Event()
        self.gate.set()
        self._news = threading.Condition()
        self._events: list[dict[str, Any]] = []
        self._before = JobState.RUNNING
        self.job: dict[str, Any] = {
            "id": "dqn-CartPole-v1",
            "state": JobState.RUNNING.name,
            "reason": "",
            "run_dir": "runs/dqn-CartPole-v1-seed1",
            "agent": "dqn",
            "env": "CartPole-v1",
            "policy_id": "main",
            "began": time.time() - 90.0,
            "env_steps": 24_000,
            "until": 100_000,
            "learner_steps": 1_500,
            "params_version": 150,
            "staleness": 1.5,
            "env_steps_per_second": 1_900.0,
            "updates_per_second": 118.0,
            "return_mean": 231.5,
            "eval_return": 310.25,
            "evaluated_version": 140,
            "waits_for": None,
            "retries": 1,
            "restarts": 2,
            "coordinator_restarts": 0,
        }
        self.limits = {"collector": [MIN_ACTORS, MAX_ACTORS]}
        self.workers: list[dict[str, Any]] = [self.worker("learner", 0), self.worker("evaluator", 0, state="IDLE")]
        self.workers += [self.worker("collector", index) for index in range(collectors)]
        self.returns = [[1_000 * i, 9.0 + 0.4 * i * i] for i in range(1, 25)]
        self.evaluations = [[6_000 * i, 12.0 + 19.0 * i * i, 35 * i] for i in range(1, 5)]
        self.operator: dict[str, Any] = {"kind": "local", "connected": True, "problem": ""}
        self.wanted = {"learner": 1, "collector": collectors, "evaluator": 1}
        self.happen("job", "The job begins: dqn on CartPole-v1.")

    def worker(self, role: str, index: int, state: str = "BUSY", **fields: Any) -> dict[str, Any]:
        collects = role == "collector"
        return {
            "worker_id": f"{role}/{index}",
            "role": role,
            "index": index,
            "incarnation": 0,
            "state": state,
            "task_id": f"{role}-task-{index}" if state == "BUSY" else None,
            "attempt": 0,
            "host": "localhost",
            "pid": 4000 + index,
            "silent_for": 0.4,
            "env_steps": 12_000 if collects else 0,
            "env_steps_per_second": 950.0 if collects else None,
            "episodes": 80 if collects else 0,
            "return_mean": 229.0 + index if collects else None,
            "params_version": 149,
            **fields,
        }

    def become(self, state: JobState, reason: str = "") -> None:
        """Change the job's state, and add an event."""
        self.job.update(state=state.name, reason=reason)
        self.happen("state", f"The job is {state.name}." + (f" {reason}" if reason else ""))

    def happen(self, kind: str, text: str, **fields: Any) -> int:
        """Add an event, and return its number."""
        with self._news:
            number = len(self._events) + 1
            self._events.append({"number": number, "time": time.time(), "kind": kind, "text": text, **fields})
            self._news.notify_all()
        return number

    def status(self) -> dict[str, Any]:
        self._answer()
        self.asked += 1
        tasks = [
            {
                "task_id": one["task_id"],
                "kind": "collect",
                "state": "RUNNING",
                "attempt": 0,
                "worker_id": one["worker_id"],
                "overrides": {"env": {"gravity": 12}, "collector": {"epsilon": 0.5}}
                if one["role"] == "collector"
                else {},
            }
            for one in self.workers
            if one["task_id"]
        ]
        return {
            "job": dict(self.job),
            "wanted": dict(self.wanted),
            "limits": self.limits,
            "scaling": "auto",
            "workers": [dict(one) for one in self.workers],
            "tasks": tasks,
            "replay": {"items": 10_000, "steps": 10_000, "added": 24_000, "sampled": 96_000, "evicted": 14_000},
            "operator": dict(self.operator),
            "accounts": {"granted": 1_503, "learned": 1_500, "dropped": 3},
            "returns": self.returns,
            "evaluations": self.evaluations,
        }

    def events(self, since: int, timeout: float = 0.0) -> list[dict[str, Any]]:
        self._answer()
        with self._news:
            self._news.wait_for(lambda: len(self._events) > since, timeout)
            return list(self._events[since:])

    def cancel(self, reason: str = "") -> None:
        self._command("cancel", reason)
        self.become(JobState.DRAINING, reason or "it was stopped")

    def pause(self) -> None:
        self._command("pause")
        self._before = JobState(self.job["state"])
        self.job["waits_for"] = "paused"
        self.become(JobState.PAUSED)

    def unpause(self) -> None:
        self._command("unpause")
        if self.job["state"] != JobState.PAUSED.name:
            raise UsageError("The job is not paused.")
        self.job["waits_for"] = None
        self.become(self._before)

    def scale(self, role: str, n: int) -> None:
        CoordinatorConfig("", min_collectors=MIN_ACTORS, max_collectors=MAX_ACTORS).check_count(role, n)
        self._command("scale", role, n)
        self.wanted[role] = n
        rest = [one for one in self.workers if one["role"] != role]
        self.workers = rest + [self.worker(role, index) for index in range(n)]
        self.happen("scale", f"{n} workers of the role {role} were requested.")

    def evaluate_now(self) -> None:
        if self.evaluates:
            raise UsageError("An evaluation is already in progress.")
        self._command("evaluate_now")

    def restore(self) -> None:
        self._command("restore")

    def checkpoint(self) -> str:
        self._command("checkpoint")
        return "step 1500"

    def _command(self, *call: Any) -> None:
        self._answer()
        if is_over(JobState(self.job["state"])):
            job = self.job
            raise UsageError(f"The job is over: {job['state']} ({job['reason']}). It takes no commands.")
        self.calls.append(call)

    def _answer(self) -> None:
        if not self.gate.wait(30.0):
            raise AssertionError("The test did not set the gate.")
        if self.away is not None:
            raise self.away
