"""What Prometheus is told. Queues are read when it asks; only durations of requests are counted as they pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from rlframe.trajectories.messages import RunStatus
from rlframe.trajectories.queue.reports import Report

PREFIX = "rlframe_trajectories_"


class RunState(NamedTuple):
    status: RunStatus
    report: Report


class Scrape(NamedTuple):
    """What the service was when it was asked."""

    runs: Mapping[str, RunState]
    stored_bytes: int
    max_bytes: int
    writing_bytes: int
    failed: bool


def families(scrape: Scrape) -> Iterator[Metric]:
    """The queues as metrics."""
    for name, help_text, value in (
        ("stored_bytes", "Bytes of all groups that are kept.", scrape.stored_bytes),
        ("stored_bytes_limit", "Bytes that may be kept (--max-queue-mb).", scrape.max_bytes),
        ("writing_bytes", "Bytes of groups that are being written.", scrape.writing_bytes),
        ("store_failed", "1 where the store has failed and every write is refused.", scrape.failed),
    ):
        yield GaugeMetricFamily(PREFIX + name, help_text, value)
    for kind, table in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
        for name, help_text, read in table:
            family: Any = kind(PREFIX + name, help_text, labels=["run"])
            for run, state in scrape.runs.items():
                found = read(state)
                if found is not None:
                    family.add_metric([run], found)
            yield family
    staleness = SummaryMetricFamily(
        PREFIX + "staleness_versions",
        "Policy versions by which groups were older than the trainer's when served, where both are known.",
        labels=["run"],
    )
    for run, state in scrape.runs.items():
        known = state.report.staleness
        staleness.add_metric([run], count_value=known.groups, sum_value=known.mean * known.groups)
    yield staleness


# Name, help, and how it is read of a `RunState`. Counters start afresh with each epoch of a run.
_COUNTERS = (
    ("groups_received", "Groups that were kept.", lambda run: run.report.groups_added),
    ("sequences_received", "Sequences in groups that were kept.", lambda run: run.report.sequences_added),
    ("tokens_received", "Tokens in groups that were kept.", lambda run: run.report.tokens_added),
    ("groups_served", "Groups in batches, each counted once.", lambda run: run.report.groups_served),
    ("sequences_served", "Sequences in batches, each counted once.", lambda run: run.report.sequences_served),
    ("groups_refused", "Groups that came too early, or that no batch can hold.", lambda run: run.report.refused),
    ("groups_duplicate", "Groups whose idempotency key was known.", lambda run: run.report.duplicates),
    ("groups_discarded", "Groups that were too old at their turn.", lambda run: run.report.discarded),
    ("batches_served", "Batches, each counted once.", lambda run: run.report.batches_served),
    ("batches_redelivered", "Batches that were handed out again.", lambda run: run.report.redelivered),
)
_GAUGES = (
    ("epoch", "Rises whenever the run starts afresh.", lambda run: run.status.epoch),
    ("step", "The training step that the next batch is for.", lambda run: run.status.current_step),
    ("policy_version", "That the trainer has, where it tells.", lambda run: run.status.policy_version),
    ("paused", "1 while all environments are told to hold.", lambda run: run.status.paused),
    ("queue_groups", "Groups in the queue, those set aside too.", lambda run: run.status.queue_size),
    ("queue_sequences", "Sequences in the queue, those set aside too.", lambda run: run.report.queued_sequences),
    ("queue_oldest_seconds", "What waits longest.", lambda run: run.report.oldest_age or 0.0),
    ("set_aside_groups", "Groups that no exact batch can hold.", lambda run: run.status.set_aside),
    ("buffered_groups", "Groups of odd sizes that complete no unit yet.", lambda run: run.status.buffered),
    ("leased_groups", "Groups in batches that are not acknowledged.", lambda run: run.status.leased),
    ("run_stored_bytes", "Bytes of the run's groups that are kept.", lambda run: run.status.stored_bytes),
    ("batches_out", "Batches under a lease.", lambda run: run.report.batches_out),
    ("batches_returned", "Batches that wait to be handed out again.", lambda run: run.report.batches_returned),
    ("batches_kept", "Batches without a lease, for the same request again.", lambda run: run.report.batches_kept),
    (
        "staleness_versions_largest",
        "The largest staleness of a served group.",
        lambda run: run.report.staleness.largest,
    ),
    ("envs_live", "Environments that were heard of lately.", lambda run: run.status.live_envs),
    ("envs_registered", "Environments that registered in this epoch.", lambda run: run.report.registered_envs),
)
