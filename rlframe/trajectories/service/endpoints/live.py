"""What the live page shows, and Prometheus reads."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

import rlframe
from rlframe.http.middleware import answer
from rlframe.trajectories.service import models
from rlframe.trajectories.service.endpoints import INVALID, run_of, service_of
from rlframe.trajectories.service.previews import preview
from rlframe.trajectories.service.prometheus import families
from rlframe.trajectories.service.service import Service
from rlframe.trajectories.service.state_machine import LATEST

router = APIRouter(tags=["live page"])
metrics_router = APIRouter(tags=["service"])
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


_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@metrics_router.get("/metrics", response_class=Response, responses=_TEXT)
async def read_metrics(request: Request) -> Response:
    """The state of all runs, and durations of requests, as Prometheus reads them."""
    service = service_of(request)
    runs = service.runs
    # Here, where nothing changes meanwhile; the text may take longer.
    found = families(_of_service(service), {run: _report(service, run, 0, runs) for run in runs})
    respond = request.app.state.metrics.response
    return await asyncio.get_running_loop().run_in_executor(None, respond, found)


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
        max_bytes=service.room.limit,
        nearly_full=service.room.nearly_full,
        failed=None if service.failed is None else str(service.failed),
    )
