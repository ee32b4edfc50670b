"""Endpoints of the live page, and metrics for Prometheus.

The metrics of queues are read at each request. Only the durations of requests are collected all the time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from starlette.responses import Response

import rlframe
from rlframe.http.bodies import answer
from rlframe.trajectories.service import models
from rlframe.trajectories.service.endpoints import INVALID, run_of, service_of
from rlframe.trajectories.service.models import LiveReport, ServiceReport, preview
from rlframe.trajectories.service.service import Service
from rlframe.trajectories.service.state_machine import LATEST

PREFIX = "rlframe_trajectories_"


def families(service: ServiceReport, runs: Mapping[str, LiveReport]) -> Iterator[Metric]:
    """Yield the metrics of the service and of its runs."""
    for name, help_text, value in (
        ("stored_bytes", "Bytes of all stored groups.", service.stored_bytes - service.writing_bytes),
        ("stored_bytes_limit", "Limit of stored bytes: --max-queue-mb, or the space on the disk.", service.max_bytes),
        ("writing_bytes", "Bytes of groups that are being written.", service.writing_bytes),
        ("store_failed", "1 if the store has failed and refuses all writes.", service.failed is not None),
    ):
        yield GaugeMetricFamily(PREFIX + name, help_text, value)
    for kind, table in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
        for name, help_text, read in table:
            family: Any = kind(PREFIX + name, help_text, labels=["run"])
            for run, report in runs.items():
                found = read(report)
                if found is not None:
                    family.add_metric([run], found)
            yield family
    staleness = SummaryMetricFamily(
        PREFIX + "staleness_versions",
        "Staleness of served groups: policy versions by which a group was older than the trainer's policy.",
        labels=["run"],
    )
    for run, report in runs.items():
        known = report.staleness
        staleness.add_metric([run], count_value=known.groups, sum_value=known.mean * known.groups)
    yield staleness


# Name, help text, and a function that reads the value from a `LiveReport`. A new epoch of a run resets the counters.
_COUNTERS = (
    ("groups_received", "Groups that were stored.", lambda run: run.groups_added),
    ("sequences_received", "Sequences in groups that were stored.", lambda run: run.sequences_added),
    ("tokens_received", "Tokens in groups that were stored.", lambda run: run.tokens_added),
    ("groups_served", "Groups in batches, each counted once.", lambda run: run.groups_served),
    ("sequences_served", "Sequences in batches, each counted once.", lambda run: run.sequences_served),
    ("groups_refused", "Groups that came too early, or that no batch can hold.", lambda run: run.refused),
    ("groups_duplicate", "Groups with a repeated idempotency key.", lambda run: run.duplicates),
    ("groups_discarded", "Groups that were too old at their turn.", lambda run: run.discarded),
    ("batches_served", "Batches, each counted once.", lambda run: run.batches_served),
    ("batches_redelivered", "Redelivered batches.", lambda run: run.redelivered),
)
_GAUGES = (
    ("epoch", "Number of the epoch, which increases with each reset.", lambda run: run.status.epoch),
    ("step", "Training step of the next batch.", lambda run: run.status.current_step),
    ("policy_version", "The trainer's policy version, if known.", lambda run: run.status.policy_version),
    ("paused", "1 while environments should start no new groups.", lambda run: run.status.paused),
    ("queue_groups", "Groups in the queue, including those set aside.", lambda run: run.status.queue_size),
    ("queue_sequences", "Sequences in the queue, including those set aside.", lambda run: run.queued_sequences),
    ("queue_oldest_seconds", "Seconds for which the oldest unit has waited.", lambda run: run.oldest_age or 0.0),
    ("set_aside_groups", "Groups that fit into no exact batch.", lambda run: run.status.set_aside),
    ("buffered_groups", "Undersized groups that complete no unit yet.", lambda run: run.status.buffered),
    ("leased_groups", "Groups in batches that are not acknowledged.", lambda run: run.status.leased),
    ("run_stored_bytes", "Bytes of the run's stored groups.", lambda run: run.status.stored_bytes),
    ("batches_out", "Batches under a lease.", lambda run: run.batches_out),
    ("batches_returned", "Batches that wait for redelivery.", lambda run: run.batches_returned),
    ("batches_kept", "Batches without a lease, kept for a repeated request.", lambda run: run.batches_kept),
    (
        "staleness_versions_largest",
        "The largest staleness of a served group.",
        lambda run: run.staleness.largest,
    ),
    ("envs_live", "Environments with a recent heartbeat.", lambda run: run.status.live_envs),
    ("envs_registered", "Environments that registered in this epoch.", lambda run: run.registered_envs),
)


router = APIRouter(tags=["live page"])
MAX_ENVS = 10_000  # maximum number of environments in one report


@router.get("/report", response_model=models.LiveReport, responses=INVALID)
async def report(
    request: Request,
    envs: Annotated[
        int, Query(ge=1, le=MAX_ENVS, description="Largest number of environments, live ones first.")
    ] = 200,
) -> Response:
    """Return the data of the live page, without trajectories."""
    service = service_of(request)
    return answer(_report(service, run_of(request), envs, service.runs))


@router.get("/previews", response_model=models.Previews, responses=INVALID)
async def previews(request: Request, count: Annotated[int, Query(ge=1, le=LATEST)] = 5) -> Response:
    """Return the latest groups, newest first, as shortened text."""
    payloads = await service_of(request).latest_groups(run_of(request), count)
    decode = request.app.state.decode  # function from token ids to text; None shows the ids

    def read() -> bytes:
        return msgspec.json.encode(models.Previews(decode is not None, [preview(one, decode) for one in payloads]))

    content = await asyncio.get_running_loop().run_in_executor(None, read)
    return Response(content, media_type="application/json")


async def read_families(service: Service) -> Iterator[Metric]:
    """Return the metrics of all runs at one moment. Nothing changes between the reads, because there is no await."""
    runs = service.runs
    return families(_of_service(service), {run: _report(service, run, 0, runs) for run in runs})


def _report(service: Service, run: str, envs: int, runs: list[str]) -> models.LiveReport:
    queue = service.queue(run)
    now = time.time()
    return models.LiveReport(
        **vars(queue.report(now, envs)),
        registration=queue.epoch.registration,
        status=queue.status(),
        run=run,
        runs=runs,
        now=now,
        service=_of_service(service),
    )


def _of_service(service: Service) -> models.ServiceReport:
    return models.ServiceReport(
        version=rlframe.__version__,
        durability=service.store.durability,
        stored_bytes=service.stored_bytes + service.pending_bytes,
        writing_bytes=service.pending_bytes,
        max_bytes=service.byte_limit,
        nearly_full=service.nearly_full,
        failed=None if service.failed is None else str(service.failed),
    )
