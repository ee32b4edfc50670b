"""What Prometheus is told of the policy: it is read when it asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "rlframe_policy_"

# Name, help, and what it is called in `PolicyServer.stats`.
_COUNTERS = (
    ("completions", "Completions that were asked for.", "requests"),
    ("tokens", "Tokens that were sampled.", "tokens"),
    ("prompt_tokens", "Tokens of prompts that were read.", "prompt_tokens"),
    ("engine_calls", "Calls of the decode engine.", "calls"),
    ("refreshes", "Versions of the parameters that were taken over.", "refreshes"),
)
_GAUGES = (
    ("running", "Completions that are decoded.", "running"),
    ("waiting", "Completions that wait for a slot.", "waiting"),
    ("version", "Of the parameters.", "version"),
    ("learner_version", "The newest that was heard of; -1: none.", "learner_version"),
    ("versions_behind", "Versions by which the parameters are older than the newest heard of.", "versions_behind"),
    ("since_refresh_seconds", "Since the parameters were taken over.", "since_refresh"),
    ("since_learner_seconds", "Since the learner was heard of.", "since_learner"),
)


class PolicyCollector(Collector):
    """`PolicyServer.stats` as metrics."""

    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        for family, table in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, help_text, key in table:
                if self._stats.get(key) is not None:
                    yield family(PREFIX + name, help_text, self._stats[key])
