"""Endpoints that receive groups."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from rlframe.http.bodies import MSGPACK, answer, retry_later
from rlframe.trajectories.queue import reports
from rlframe.trajectories.queue.leases import AddResult
from rlframe.trajectories.service import models
from rlframe.trajectories.service.endpoints import (
    REPLAYED,
    WRITES,
    IdempotencyKey,
    invalid,
    raw_body,
    run_of,
    service_of,
)
from rlframe.trajectories.service.service import Service
from rlframe.trajectories.service.validation import InvalidGroupError
from rlframe.trajectories.service.wire import ParsedGroup, parse_group, parse_groups

router = APIRouter(tags=["groups"])
RAW = ("/scored_data", "/scored_data_list")  # paths whose endpoints read the body themselves
TOO_OLD: dict[int | str, dict[str, Any]] = {
    409: {"model": models.Failure, "description": "Sampled from an older policy than the trainer accepts."}
}
_TOO_EARLY_RETRY = 5  # seconds (Retry-After) for a group that would be too old when it could be served


@router.post(
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


@router.post(
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
