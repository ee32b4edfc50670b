"""Batches go out."""

from __future__ import annotations

import time
from typing import Annotated, Any, Union

import msgspec
from fastapi import APIRouter, Query, Request
from msgspec import Raw
from starlette.responses import Response

from rlframe.http.bodies import MSGPACK, answer
from rlframe.trajectories.queue.leases import LeasedBatch
from rlframe.trajectories.queue.queue import Queue
from rlframe.trajectories.service import models
from rlframe.trajectories.service.endpoints import MAX_NAME, WRITES, run_of, service_of
from rlframe.trajectories.service.service import Service
from rlframe.trajectories.service.state_machine import LATEST
from rlframe.trajectories.service.wire import as_json, as_packed, join_json, join_packed

router = APIRouter(tags=["batches"])

_NONE_YET: dict[str, list[Any]] = {
    name: []
    for name in (
        *("tokens", "masks", "scores", "advantages", "ref_logprobs"),
        *("generation_params", "inference_logprobs", "messages", "images"),
    )
}
_UNKNOWN: dict[int | str, dict[str, Any]] = {
    404: {"model": models.Failure, "description": "It is neither leased nor waits to be delivered again."}
}
Name = Annotated[str, Query(min_length=1, max_length=MAX_NAME)]
Lease = Annotated[
    float, Query(gt=0, le=86_400, allow_inf_nan=False, description="Seconds until it is somebody else's.")
]


@router.get("/batch", response_model=Union[models.BatchAnswer, models.NotRegistered], responses=WRITES)
async def batch(
    request: Request,
    wait: Annotated[float, Query(ge=0, le=60, allow_inf_nan=False, description="Seconds to wait for data.")] = 0.0,
    lease: Lease | None = None,
    consumer: Name | None = None,
    request_key: Annotated[
        str | None,
        Query(alias="request", min_length=1, max_length=MAX_NAME, description="The same again gets the same batch."),
    ] = None,
    policy_version: Annotated[models.Version | None, Query(description="That the trainer has now.")] = None,
) -> Response:
    """The next batch, of exactly batch_size sequences, or null."""
    service, run = service_of(request), run_of(request)
    queue = service.queue(run)
    if queue.epoch.registration is None:
        content = {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": None}
        return answer(content)
    if not queue.epoch.started:
        await service.submit(run, "note_trainer")
    if policy_version is not None and policy_version != queue.epoch.policy_version:
        await service.submit(run, "set_policy_version", version=policy_version)
    deadline = time.monotonic() + wait
    asked = {"lease_seconds": lease, "consumer": consumer, "request": request_key}
    taken = await _take(service, run, asked)
    while taken is None and (left := deadline - time.monotonic()) > 0 and not service.closing:
        await request.body()  # what is received after it is that the client left
        if not _worth(service.queue(run), asked):  # what came since the answer wakes nobody who was not waiting yet
            await service.changed(run, left)
        if await request.is_disconnected():
            break
        taken = await _take(service, run, asked)
    leased = lease is not None or consumer is not None
    extras = _extras(taken[0] if taken else None) if leased else {}
    return _encoded(request, "batch", taken[1] if taken else None, extras)


@router.post("/batch/{batch_id}/ack", response_model=models.Success, responses=WRITES | _UNKNOWN)
async def ack(batch_id: models.Int64, request: Request) -> Response:
    """The batch was trained on: it will not come again."""
    return _settled(batch_id, await service_of(request).submit(run_of(request), "ack", batch_id=batch_id))


@router.post("/batch/{batch_id}/nack", response_model=models.Success, responses=WRITES | _UNKNOWN)
async def nack(batch_id: models.Int64, request: Request, consumer: Name | None = None) -> Response:
    """The batch goes to the next who asks; with `consumer`, only where it is still his."""
    known = await service_of(request).submit(run_of(request), "nack", batch_id=batch_id, consumer=consumer)
    return _settled(batch_id, known)


@router.post("/batch/{batch_id}/renew", response_model=models.Success, responses=WRITES | _UNKNOWN)
async def renew(batch_id: models.Int64, request: Request, lease: Lease, consumer: Name | None = None) -> Response:
    """The leased batch is its consumer's for so many seconds from now on; with `consumer`, only where it is his."""
    renewed = await service_of(request).submit(
        run_of(request), "renew", batch_id=batch_id, lease_seconds=lease, consumer=consumer
    )
    return _settled(batch_id, renewed)


@router.get("/latest_example", response_model=Union[models.Item, dict[str, list[Any]]])
async def latest_example(request: Request) -> Response:
    """The group that was sent last, or the keys of one with empty lists."""
    groups = await service_of(request).latest_groups(run_of(request), 1)
    if not groups:
        return answer(_NONE_YET)
    if _wants_packed(request):
        return Response(as_packed(groups[0]), media_type=MSGPACK)
    return Response(as_json(groups[0]), media_type="application/json")


@router.get("/latest", response_model=dict[str, list[models.Item]], responses=WRITES)
async def latest(request: Request, count: Annotated[int, Query(ge=1, le=LATEST)] = 1) -> Response:
    """The groups that were sent last, newest first."""
    groups = await service_of(request).latest_groups(run_of(request), count)
    return _encoded(request, "groups", groups, {})


async def _take(service: Service, run: str, asked: dict[str, Any]) -> tuple[LeasedBatch, list[bytes]] | None:
    return await service.take(run, **asked) if _worth(service.queue(run), asked) else None


def _worth(queue: Queue, asked: dict[str, Any]) -> bool:
    """A poll that would be given nothing is no command."""
    return queue.may_take(time.time(), asked["consumer"], asked["request"])


def _extras(batch: LeasedBatch | None) -> dict[str, Any]:
    if batch is None:
        return {"batch_id": None, "step": None, "redelivered": None}
    return {"batch_id": batch.batch_id, "step": batch.step, "redelivered": batch.delivery > 1}


def _encoded(request: Request, name: str, payloads: list[bytes] | None, extras: dict[str, Any]) -> Response:
    """`{name: [items]}` and more, joined from stored bytes."""
    if _wants_packed(request):
        items = Raw(join_packed(payloads)) if payloads is not None else None
        return Response(msgspec.msgpack.encode({name: items, **extras}), media_type=MSGPACK)
    items = Raw(join_json(payloads)) if payloads is not None else None
    return Response(msgspec.json.encode({name: items, **extras}), media_type="application/json")


def _wants_packed(request: Request) -> bool:
    return MSGPACK in request.headers.get("accept", "")


def _settled(batch_id: int, known: bool) -> Response:
    if known:
        return answer({"status": "success"})
    error = f"Batch {batch_id} is not out (to this consumer): it was acknowledged, given back or late, or never was."
    return answer({"status": "failure", "error": error}, 404)
