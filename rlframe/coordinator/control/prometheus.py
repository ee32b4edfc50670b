"""What Prometheus is told of a run: its status, when it is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rlframe.coordinator.messages import ROLES
from rlframe.coordinator.states import JobState, WorkerState
from rlframe.http.measuring import RequestMetrics

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


class Metrics(RequestMetrics):
    """All of one application: its requests, its process, and the coordinator's status."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        self._prefix = prefix

    def text(self, status: dict[str, Any] | None) -> bytes:
        """The exposition in Prometheus's text format 0.0.4; `status` is None where the coordinator does not answer."""
        return self.exposition(_Status(self._prefix, status))


class _Status(Collector):
    def __init__(self, prefix: str, status: dict[str, Any] | None) -> None:
        self._prefix, self._status = prefix, status

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(self._prefix + "up", "1 where the coordinator answers.", self._status is not None)
        if self._status is None:
            return
        job = self._status["job"]
        for family, table in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, help_text, key in table:
                if job.get(key) is not None:
                    yield family(self._prefix + name, help_text, job[key])
        state = GaugeMetricFamily(self._prefix + "job_state", "1 for the state that the job is in.", labels=["state"])
        for one in JobState:
            state.add_metric([one.name], job["state"] == one.name)
        yield state
        yield self._workers()
        for name, help_text, key in (
            ("replay", "Counts of the replay buffer.", "replay"),
            ("batches", "Batches by what became of them.", "accounts"),
        ):
            metric = GaugeMetricFamily(self._prefix + name, help_text, labels=["count"])
            for count, value in (self._status.get(key) or {}).items():
                if isinstance(value, (int, float)):
                    metric.add_metric([str(count)], value)
            yield metric

    def _workers(self) -> Metric:
        assert self._status is not None
        counts = Counter((one["role"], one["state"]) for one in self._status.get("workers") or ())
        workers = GaugeMetricFamily(self._prefix + "workers", "Workers by role and state.", labels=["role", "state"])
        for role in ROLES if "wanted" in self._status else sorted({role for role, _ in counts}):
            for state in WorkerState:
                workers.add_metric([role, state.name], counts[role, state.name])
        return workers
