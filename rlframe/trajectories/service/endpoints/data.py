"""Endpoints for the data of a run: receive groups, deliver batches, and show the latest groups."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Union

import msgspec
from fastapi import APIRouter, Query, Request
from msgspec import Raw
from starlette.responses import Response

from rlframe.http.bodies import MSGPACK, answer, retry_later
from rlframe.trajectories.queue import reports
from rlframe.trajectories.queue.leases import AddResult, LeasedBatch
from rlframe.trajectories.queue.queue import Queue
from rlframe.trajectories.service import models
from rlframe.trajectories.service.endpoints import (
    MAX_NAME,
    REPLAYED,
    WRITES,
    IdempotencyKey,
    invalid,
    raw_body,
    run_of,
    service_of,
)
from rlframe.trajectories.service.service import Service
from rlframe.trajectories.service.state_machine import LATEST
from rlframe.trajectories.service.validation import InvalidGroupError
from rlframe.trajectories.service.wire import (
    ParsedGroup,
    as_json,
    as_packed,
    join_json,
    join_packed,
    parse_group,
    parse_groups,
)

batch_router = APIRouter(tags=["batches"])

_NONE_YET: dict[str, list[Any]] = {
    name: []
    for name in (
        *("tokens", "masks", "scores", "advantages", "ref_logprobs"),
        *("generation_params", "inference_logprobs", "messages", "images"),
    )
}
_UNKNOWN: dict[int | str, dict[str, Any]] = {
    404: {"model": models.Failure, "description": "The batch is not leased, and does not wait for redelivery."}
}
Name = Annotated[str, Query(min_length=1, max_length=MAX_NAME)]
Lease = Annotated[
    float, Query(gt=0, le=86_400, allow_inf_nan=False, description="Seconds for which the consumer owns the batch.")
]


@batch_router.get("/batch", response_model=Union[models.BatchAnswer, models.NotRegistered], responses=WRITES)
async def batch(
    request: Request,
    wait: Annotated[float, Query(ge=0, le=60, allow_inf_nan=False, description="Seconds to wait for a batch.")] = 0.0,
    lease: Lease | None = None,
    consumer: Name | None = None,
    request_key: Annotated[
        str | None,
        Query(
            alias="request",
            min_length=1,
            max_length=MAX_NAME,
            description="Key of the request. A repeated key gets the same batch.",
        ),
    ] = None,
    policy_version: Annotated[models.Version | None, Query(description="The trainer's current policy version.")] = None,
) -> Response:
    """Return the next batch of exactly batch_size sequences, or null."""
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
    options = {"lease_seconds": lease, "consumer": consumer, "request": request_key}
    taken = await _take(service, run, options)
    while taken is None and (left := deadline - time.monotonic()) > 0 and not service.closing:
        await request.body()  # read the body, because `is_disconnected` works only after that
        # Check again before the wait. If a batch became ready after `_take`, no later change would end the wait.
        if not _may_take(service.queue(run), options):
            await service.wait_for_change(run, left)
        if await request.is_disconnected():
            break
        taken = await _take(service, run, options)
    leased = lease is not None or consumer is not None
    extras = _extras(taken[0] if taken else None) if leased else {}
    return _encoded(request, "batch", taken[1] if taken else None, extras)


@batch_router.post("/batch/{batch_id}/ack", response_model=models.Success, responses=WRITES | _UNKNOWN)
async def ack(batch_id: models.Int64, request: Request) -> Response:
    """Acknowledge a batch, so that it is not delivered again."""
    return _settled(batch_id, await service_of(request).submit(run_of(request), "ack", batch_id=batch_id))


@batch_router.post("/batch/{batch_id}/nack", response_model=models.Success, responses=WRITES | _UNKNOWN)
async def nack(batch_id: models.Int64, request: Request, consumer: Name | None = None) -> Response:
    """Give a leased batch back, so that the next request gets it. If `consumer` is sent, it must own the batch."""
    known = await service_of(request).submit(run_of(request), "nack", batch_id=batch_id, consumer=consumer)
    return _settled(batch_id, known)


@batch_router.post("/batch/{batch_id}/renew", response_model=models.Success, responses=WRITES | _UNKNOWN)
async def renew(batch_id: models.Int64, request: Request, lease: Lease, consumer: Name | None = None) -> Response:
    """Extend the lease of a batch to `lease` seconds from now. If `consumer` is sent, it must own the batch."""
    renewed = await service_of(request).submit(
        run_of(request), "renew", batch_id=batch_id, lease_seconds=lease, consumer=consumer
    )
    return _settled(batch_id, renewed)


@batch_router.get("/latest_example", response_model=Union[models.Item, dict[str, list[Any]]])
async def latest_example(request: Request) -> Response:
    """Return the latest group. If there is no group, return the keys of a group with empty lists."""
    groups = await service_of(request).latest_groups(run_of(request), 1)
    if not groups:
        return answer(_NONE_YET)
    if _accepts_msgpack(request):
        return Response(as_packed(groups[0]), media_type=MSGPACK)
    return Response(as_json(groups[0]), media_type="application/json")


@batch_router.get("/latest", response_model=dict[str, list[models.Item]], responses=WRITES)
async def latest(request: Request, count: Annotated[int, Query(ge=1, le=LATEST)] = 1) -> Response:
    """Return the latest groups, newest first."""
    groups = await service_of(request).latest_groups(run_of(request), count)
    return _encoded(request, "groups", groups, {})


async def _take(service: Service, run: str, options: dict[str, Any]) -> tuple[LeasedBatch, list[bytes]] | None:
    return await service.take(run, **options) if _may_take(service.queue(run), options) else None


def _may_take(queue: Queue, options: dict[str, Any]) -> bool:
    """Return False if `take` would find no batch. Then this poll logs no command."""
    return queue.may_take(time.time(), options["consumer"], options["request"])


def _extras(batch: LeasedBatch | None) -> dict[str, Any]:
    if batch is None:
        return {"batch_id": None, "step": None, "redelivered": None}
    return {"batch_id": batch.batch_id, "step": batch.step, "redelivered": batch.delivery > 1}


def _encoded(request: Request, name: str, payloads: list[bytes] | None, extras: dict[str, Any]) -> Response:
    """Return the answer `{name: [items], **extras}`. Join the stored bytes of the items without decoding them."""
    if _accepts_msgpack(request):
        items = Raw(join_packed(payloads)) if payloads is not None else None
        return Response(msgspec.msgpack.encode({name: items, **extras}), media_type=MSGPACK)
    items = Raw(join_json(payloads)) if payloads is not None else None
    return Response(msgspec.json.encode({name: items, **extras}), media_type="application/json")


def _accepts_msgpack(request: Request) -> bool:
    return MSGPACK in request.headers.get("accept", "")


def _settled(batch_id: int, known: bool) -> Response:
    if known:
        return answer({"status": "success"})
    error = (
        f"Batch {batch_id} is not leased (by this consumer): it was acknowledged or given back, its lease ended, or it "
        "never existed."
    )
    return answer({"status": "failure", "error": error}, 404)


group_router = APIRouter(tags=["groups"])
RAW = ("/scored_data", "/scored_data_list")  # paths whose endpoints read the body themselves
TOO_OLD: dict[int | str, dict[str, Any]] = {
    409: {"model": models.Failure, "description": "Sampled from an older policy than the trainer accepts."}
}
_TOO_EARLY_RETRY = 5  # seconds (Retry-After) for a group that would be too old when it could be served


@group_router.post(
    "/scored_data",
    response_model=models.Received,
    responses=WRITES | TOO_OLD,
    openapi_extra=raw_body(models.ITEM),
)
async def scored_data(request: Request, key: IdempotencyKey = None) -> Response:
    """Receive one group: sequences for one prompt. The group is stored if the answer is "received" or "buffered"."""
    service, run = service_of(request), run_of(request)
    body = await request.body()
    async with service.decode_lock:
        await asyncio.sleep(0)  # other requests can run between two groups
        group = parse_group(body, _is_packed(request))
    _check_size(service, run, group)
    added = await _add(service, run, group, key)
    if added.status == "refused":
        return _refused(added)
    content: dict[str, Any] = {"status": added.status}
    if added.status == "buffered":
        content["buffer_size"] = added.buffer_size
    return answer(content, headers=REPLAYED if added.duplicate else None)


@group_router.post(
    "/scored_data_list",
    response_model=models.ListReceived,
    responses=WRITES | TOO_OLD,
    openapi_extra=raw_body({"type": "array", "items": models.ITEM}),
)
async def scored_data_list(request: Request, key: IdempotencyKey = None) -> Response:
    """Receive several groups. All groups are checked before the first group is stored. Group i has the key KEY/i."""
    service, run = service_of(request), run_of(request)
    body = await request.body()
    groups: list[ParsedGroup] = []
    async with service.decode_lock:
        for i, group in enumerate(parse_groups(body, _is_packed(request))):
            _check_size(service, run, group, i)
            groups.append(group)
            await asyncio.sleep(0)
    service.check_room(sum(len(group.payload) for group in groups))
    adding = [_add(service, run, group, key and f"{key}/{i}") for i, group in enumerate(groups)]
    added = await asyncio.gather(*adding)
    taken = [one for one in added if one.status != "refused"]
    refused = [one for one in added if one.status == "refused" and not one.too_old]
    too_old = [one for one in added if one.too_old]
    if added and not taken:
        return _refused((refused or too_old)[0])
    content: dict[str, Any] = {"status": "received", "groups_processed": len(taken)}
    buffered = [one.buffer_size for one in added if one.status == "buffered"]
    if buffered:
        content |= {"buffered": len(buffered), "last_buffer_size": buffered[-1]}
    if refused:
        content |= {"refused": len(refused), "error": refused[0].reason}
    if too_old:
        content["too_old"] = len(too_old)
    return answer(content, headers=REPLAYED if added and all(one.duplicate for one in added) else None)


def _is_packed(request: Request) -> bool:
    return request.headers.get("content-type", "").startswith(MSGPACK)


def _check_size(service: Service, run: str, group: ParsedGroup, *loc: int) -> None:
    """Refuse a group that no batch can hold, before it is stored."""
    # Without a policy version, the queue checks only the size.
    refusal = reports.refusal(service.queue(run).epoch, group.env_id, group.sequences, policy_version=None)
    if refusal is not None:
        raise InvalidGroupError((*loc, "tokens"), refusal.reason or "", "too_long")


async def _add(service: Service, run: str, group: ParsedGroup, key: str | None) -> AddResult:
    service.check_room(len(group.payload))
    return await service.submit(
        run,
        "add",
        group.payload,
        sequences=group.sequences,
        tokens=group.tokens,
        size_bytes=len(group.payload),
        env_id=group.env_id,
        policy_version=group.policy_version,
        key=key,
    )


def _refused(added: AddResult) -> Response:
    reason = added.reason or ""
    if added.too_large:
        return invalid(("body", "tokens"), reason, "too_long")
    if added.too_old:
        return answer({"status": "too old", "error": reason}, 409)
    return retry_later(reason, "too early", _TOO_EARLY_RETRY)
