"""The status of a coordinator's job, as plain dicts for the HTTP API."""

from __future__ import annotations

from typing import Any

from rlframe.coordinator.core.job import TrainingJob
from rlframe.coordinator.core.records import Rates, WorkerRecord
from rlframe.coordinator.messages import ROLES
from rlframe.coordinator.states import JobState, WorkerState, is_over

_EMPTY_RUN_INFO = {"id": "", "agent": "", "env": "", "run_dir": "", "until": None}
_ACCOUNTS = ("granted", "learned", "dropped", "lost", "learns", "discarded", "stale")


def status(
    job: TrainingJob,
    counters: dict[str, Any],
    *,
    run_info: dict[str, Any],
    limits: dict[str, list[int]],
    operator: dict[str, Any],
    replay: dict[str, Any],
    rates: Rates,
    now: float,
) -> dict[str, Any]:
    """Return the status of a job. See docs/run/elastic.md, "Live page and API".

    Args:
        job: The job.
        counters: The job's accounts as in the journal, so that a restart never lowers the numbers.
        run_info: See `CoordinatorConfig`.
        limits: Smallest and largest number of workers, for each role that can be scaled.
        operator: The operator's kind and problems.
        replay: Counters of the replay buffer.
        rates: Rates of environment steps and updates.
        now: The current time.
    """
    return {
        "job": {**_EMPTY_RUN_INFO, **run_info, **_job(job, counters, rates, now)},
        "wanted": dict(job.requests.wanted),
        "limits": limits,
        "scaling": "manual" if job.requests.count_is_manual else "auto",
        "workers": [
            _worker(job, worker, counters["params_version"], now)
            for worker in sorted(job.roster, key=lambda worker: (ROLES.index(worker.role), worker.index))
            if not is_over(worker.state) or worker.state is WorkerState.LOST or is_over(job.state)
        ],
        "tasks": [
            {
                "task_id": task.task_id,
                "kind": task.kind,
                "state": task.state.value,
                "attempt": task.attempt,
                "worker_id": task.worker_id,
                "overrides": task.start.overrides,
            }
            for task in job.tasks
        ],
        "replay": replay,
        "operator": {
            **operator,
            "connected": not job.operator.problem and job.state is not JobState.INIT,
            "problem": job.operator.problem,
        },
        "accounts": {name: counters[name] for name in _ACCOUNTS},
        "returns": counters["returns"],
        "evaluations": counters["evaluations"],
    }


def _job(job: TrainingJob, counters: dict[str, Any], rates: Rates, now: float) -> dict[str, Any]:
    steps_per_second, updates_per_second = rates.per_second(now)
    returns, evaluations = counters["returns"], counters["evaluations"]
    return {
        "state": job.state.value,
        "reason": job.reason,
        "policy_id": job.commander.final_policy(),
        "began": job.began,
        "seconds": now - job.began,
        "env_steps": int(sum(values[0] for values in counters["counters"].values())),
        "learner_steps": counters["learner_steps"],
        "params_version": counters["params_version"],
        "staleness": counters["logs"].get("staleness"),
        "env_steps_per_second": steps_per_second,
        "updates_per_second": updates_per_second,
        "return_mean": returns[-1][1] if returns else None,
        "eval_return": evaluations[-1][1] if evaluations else None,
        "evaluated_version": int(evaluations[-1][2]) if evaluations else None,
        "waits_for": _waits_for(job),
        "retries": counters["retries"],
        "restarts": counters["restarts"],
        "coordinator_restarts": counters["coordinator_restarts"],
    }


def _worker(job: TrainingJob, worker: WorkerRecord, learner_version: int, now: float) -> dict[str, Any]:
    task = job.tasks.get(worker.task_id)
    return {
        "worker_id": worker.worker_id,
        "role": worker.role,
        "index": worker.index,
        "incarnation": worker.incarnation,
        "state": worker.state.value,
        "task_id": worker.task_id,
        "attempt": task.attempt if task is not None else None,
        "host": worker.host,
        "pid": worker.pid,
        "silent_for": round(max(now - worker.last_reply_at, 0.0), 1),
        "env_steps": int(worker.progress.counts.get("env_steps", 0)),
        "env_steps_per_second": worker.progress.rates.per_second(now)[0] if worker.role == "collector" else None,
        "episodes": int(worker.progress.counts.get("episodes", 0)),
        "return_mean": _mean(worker.progress.counts),
        "params_version": learner_version if worker.role == "learner" else worker.progress.params_version,
    }


def _mean(counts: dict[str, float]) -> float | None:
    return counts["return_sum"] / counts["episodes"] if counts.get("episodes") else None


def _waits_for(job: TrainingJob) -> str | None:
    if job.state is JobState.PAUSED:
        return "paused"
    if job.ending is not None:
        return "evaluation" if job.tasks.open("evaluate") else None
    if job.learner.waits_for == "data":
        collectors = [worker for worker in job.roster.of("collector") if worker.task_id]
        return "pacing" if collectors and all(worker.progress.is_waiting for worker in collectors) else "data"
    return job.learner.waits_for
