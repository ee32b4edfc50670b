"""What the live page and Prometheus show. Queues are read when they ask; only durations of requests are counted."""

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
from rlframe.trajectories.service.models import LiveReport, ServiceReport
from rlframe.trajectories.service.previews import preview
from rlframe.trajectories.service.service import Service
from rlframe.trajectories.service.state_machine import LATEST

PREFIX = "rlframe_trajectories_"


def families(service: ServiceReport, runs: Mapping[str, LiveReport]) -> Iterator[Metric]:
    """The queues as metrics: what the service was when it was asked, and each of its runs by its name."""
    for name, help_text, value in (
        ("stored_bytes", "Bytes of all groups that are kept.", service.stored_bytes - service.writing_bytes),
        ("stored_bytes_limit", "Bytes that may be kept: --max-queue-mb, or what fits on the disk.", service.max_bytes),
        ("writing_bytes", "Bytes of groups that are being written.", service.writing_bytes),
        ("store_failed", "1 where the store has failed and every write is refused.", service.failed is not None),
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
        "Policy versions by which groups were older than the trainer's when served, where both are known.",
        labels=["run"],
    )
    for run, report in runs.items():
        known = report.staleness
        staleness.add_metric([run], count_value=known.groups, sum_value=known.mean * known.groups)
    yield staleness


# Name, help, and how it is read of a `LiveReport`. Counters start afresh with each epoch of a run.
_COUNTERS = (
    ("groups_received", "Groups that were kept.", lambda run: run.groups_added),
    ("sequences_received", "Sequences in groups that were kept.", lambda run: run.sequences_added),
    ("tokens_received", "Tokens in groups that were kept.", lambda run: run.tokens_added),
    ("groups_served", "Groups in batches, each counted once.", lambda run: run.groups_served),
    ("sequences_served", "Sequences in batches, each counted once.", lambda run: run.sequences_served),
    ("groups_refused", "Groups that came too early, or that no batch can hold.", lambda run: run.refused),
    ("groups_duplicate", "Groups whose idempotency key was known.", lambda run: run.duplicates),
    ("groups_discarded", "Groups that were too old at their turn.", lambda run: run.discarded),
    ("batches_served", "Batches, each counted once.", lambda run: run.batches_served),
    ("batches_redelivered", "Batches that were handed out again.", lambda run: run.redelivered),
)
_GAUGES = (
    ("epoch", "Rises whenever the run starts afresh.", lambda run: run.status.epoch),
    ("step", "The training step that the next batch is for.", lambda run: run.status.current_step),
    ("policy_version", "That the trainer has, where it tells.", lambda run: run.status.policy_version),
    ("paused", "1 while all environments are told to hold.", lambda run: run.status.paused),
    ("queue_groups", "Groups in the queue, those set aside too.", lambda run: run.status.queue_size),
    ("queue_sequences", "Sequences in the queue, those set aside too.", lambda run: run.queued_sequences),
    ("queue_oldest_seconds", "What waits longest.", lambda run: run.oldest_age or 0.0),
    ("set_aside_groups", "Groups that no exact batch can hold.", lambda run: run.status.set_aside),
    ("buffered_groups", "Groups of odd sizes that complete no unit yet.", lambda run: run.status.buffered),
    ("leased_groups", "Groups in batches that are not acknowledged.", lambda run: run.status.leased),
    ("run_stored_bytes", "Bytes of the run's groups that are kept.", lambda run: run.status.stored_bytes),
    ("batches_out", "Batches under a lease.", lambda run: run.batches_out),
    ("batches_returned", "Batches that wait to be handed out again.", lambda run: run.batches_returned),
    ("batches_kept", "Batches without a lease, for the same request again.", lambda run: run.batches_kept),
    (
        "staleness_versions_largest",
        "The largest staleness of a served group.",
        lambda run: run.staleness.largest,
    ),
    ("envs_live", "Environments that were heard of lately.", lambda run: run.status.live_envs),
    ("envs_registered", "Environments that registered in this epoch.", lambda run: run.registered_envs),
)


router = APIRouter(tags=["live page"])
MAX_ENVS = 10_000  # in one report


@router.get("/report", response_model=models.LiveReport, responses=INVALID)
async def report(
    request: Request,
    envs: Annotated[int, Query(ge=1, le=MAX_ENVS, description="At most so many, those that are live first.")] = 200,
) -> Response:
    """All that the live page shows, but for trajectories."""
    service = service_of(request)
    return answer(_report(service, run_of(request), envs, service.runs))


@router.get("/previews", response_model=models.Previews, responses=INVALID)
async def previews(request: Request, count: Annotated[int, Query(ge=1, le=LATEST)] = 5) -> Response:
    """The groups that were sent last, newest first: as much of each as fits a page, in text."""
    payloads = await service_of(request).latest_groups(run_of(request), count)
    decode = request.app.state.decode  # ids to text; None: ids are shown

    def read() -> bytes:
        return msgspec.json.encode(models.Previews(decode is not None, [preview(one, decode) for one in payloads]))

    content = await asyncio.get_running_loop().run_in_executor(None, read)
    return Response(content, media_type="application/json")


async def read_families(service: Service) -> Iterator[Metric]:
    """Return the state of all runs as metrics, read without an await, so that nothing changes in between."""
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
