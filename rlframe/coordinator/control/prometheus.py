"""What Prometheus is told of a run: its status, when it is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from rlframe.coordinator.messages import ROLES
from rlframe.coordinator.states import JobState, WorkerState
from rlframe.http.measuring import numbers

# Name, help and the key in `status["job"]`.
_COUNTERS = (
    ("env_steps", "Environment steps of the job.", "env_steps"),
    ("learner_steps", "Updates of the learner.", "learner_steps"),
    ("task_retries", "Attempts at tasks beyond the first.", "retries"),
    ("worker_restarts", "Workers that were replaced.", "restarts"),
    ("coordinator_restarts", "How often the coordinator was started again.", "coordinator_restarts"),
)
_GAUGES = (
    ("env_steps_until", "Environment steps at which the job ends.", "until"),
    ("env_steps_per_second", "Of all collectors, lately.", "env_steps_per_second"),
    ("updates_per_second", "Of the learner, lately.", "updates_per_second"),
    ("params_version", "That the learner published last.", "params_version"),
    ("staleness_versions", "Versions by which what is learned from is older.", "staleness"),
    ("return_mean", "Newest mean return in training.", "return_mean"),
    ("eval_return", "Newest evaluation.", "eval_return"),
    ("evaluated_version", "That the newest evaluation is of.", "evaluated_version"),
)


def families(prefix: str, status: dict[str, Any] | None) -> Iterator[Metric]:
    """The metrics of a status; of None, where the coordinator does not answer, that it does not."""
    yield GaugeMetricFamily(prefix + "up", "1 where the coordinator answers.", status is not None)
    if status is None:
        return
    job = status["job"]
    yield from numbers(prefix, _COUNTERS, _GAUGES, job.get)
    state = GaugeMetricFamily(prefix + "job_state", "1 for the state that the job is in.", labels=["state"])
    for one in JobState:
        state.add_metric([one.name], job["state"] == one.name)
    yield state
    yield _workers(prefix, status)
    for name, help_text, key in (
        ("replay", "Counts of the replay buffer.", "replay"),
        ("batches", "Batches by what became of them.", "accounts"),
    ):
        metric = GaugeMetricFamily(prefix + name, help_text, labels=["count"])
        for count, value in (status.get(key) or {}).items():
            if isinstance(value, (int, float)):
                metric.add_metric([str(count)], value)
        yield metric


def _workers(prefix: str, status: dict[str, Any]) -> Metric:
    counts = Counter((one["role"], one["state"]) for one in status.get("workers") or ())
    workers = GaugeMetricFamily(prefix + "workers", "Workers by role and state.", labels=["role", "state"])
    for role in ROLES if "wanted" in status else sorted({role for role, _ in counts}):
        for state in WorkerState:
            workers.add_metric([role, state.name], counts[role, state.name])
    return workers
