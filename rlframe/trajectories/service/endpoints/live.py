"""What the live page shows, and Prometheus reads."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

import rlframe
from rlframe.http.middleware import answer
from rlframe.trajectories.messages import Registration, RunStatus
from rlframe.trajectories.queue.reports import Report
from rlframe.trajectories.service.endpoints import INVALID, run_of, service_of
from rlframe.trajectories.service.previews import GroupPreview, preview
from rlframe.trajectories.service.prometheus import RunState, Scrape, families
from rlframe.trajectories.service.service import Service
from rlframe.trajectories.service.state_machine import LATEST

router = APIRouter(tags=["live page"])
metrics_router = APIRouter(tags=["service"])
MAX_ENVS = 10_000  # in one report


@dataclass(frozen=True)
class ServiceReport:
    """What all runs share. `failed` says what is wrong with the store, null where nothing is."""

    version: str
    durability: str
    stored_bytes: int
    max_bytes: int
    nearly_full: bool
    failed: str | None


@dataclass(kw_only=True)
class LiveReport(Report):
    """Counts are of this epoch; ages and silences, and `now`, the service's clock, in seconds."""

    registration: Registration | None
    status: RunStatus
    run: str
    runs: list[str]
    now: float
    service: ServiceReport


@dataclass(frozen=True)
class Previews:
    decoded: bool  # whether tokens are text; else they are ids
    groups: list[GroupPreview]


@router.get("/report", response_model=LiveReport, responses=INVALID)
async def report(
    request: Request,
    envs: Annotated[int, Query(ge=1, le=MAX_ENVS, description="At most so many, those that are live first.")] = 200,
) -> Response:
    """All that the live page shows, but for trajectories."""
    return answer(_report(service_of(request), run_of(request), envs))


@router.get("/previews", response_model=Previews, responses=INVALID)
async def previews(request: Request, count: Annotated[int, Query(ge=1, le=LATEST)] = 5) -> Response:
    """The groups that were sent last, newest first: as much of each as fits a page, in text."""
    payloads = await service_of(request).latest_groups(run_of(request), count)
    decode = request.app.state.decode  # ids to text; None: ids are shown

    def read() -> bytes:
        return msgspec.json.encode(Previews(decode is not None, [preview(one, decode) for one in payloads]))

    content = await asyncio.get_running_loop().run_in_executor(None, read)
    return Response(content, media_type="application/json")


_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@metrics_router.get("/metrics", response_class=Response, responses=_TEXT)
async def read_metrics(request: Request) -> Response:
    """The state of all runs, and durations of requests, as Prometheus reads them."""
    scrape = _scrape(service_of(request))  # here, where nothing changes meanwhile; the text may take longer
    respond = request.app.state.metrics.response
    return await asyncio.get_running_loop().run_in_executor(None, respond, families(scrape))


def _report(service: Service, run: str, count: int) -> LiveReport:
    queue = service.queue(run)
    now = time.time()
    return LiveReport(
        **vars(queue.report(now, count)),
        registration=queue.epoch.registration,
        status=queue.status(),
        run=run,
        runs=service.runs,
        now=now,
        service=ServiceReport(
            version=rlframe.__version__,
            durability=service.store.durability,
            stored_bytes=service.stored_bytes + service.pending_bytes,
            max_bytes=service.max_bytes,
            nearly_full=service.nearly_full,
            failed=None if service.failed is None else str(service.failed),
        ),
    )


def _scrape(service: Service) -> Scrape:
    now = time.time()
    queues = {name: service.queue(name) for name in service.runs}
    return Scrape(
        runs={name: RunState(queue.status(), queue.report(now, envs=0)) for name, queue in queues.items()},
        stored_bytes=service.stored_bytes,
        max_bytes=service.max_bytes,
        writing_bytes=service.pending_bytes,
        failed=service.failed is not None,
    )
