"""What environments tell and ask, but for their groups."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import time
from typing import Annotated, Union

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from rlframe.http.middleware import answer
from rlframe.trajectories.messages import EnvStatus
from rlframe.trajectories.service import models
from rlframe.trajectories.service.endpoints import (
    REPLAYED,
    WRITES,
    IdempotencyKey,
    invalid,
    raw_body,
    reference,
    run_of,
    service_of,
)
from rlframe.trajectories.service.service import Service

router = APIRouter(tags=["environments"])
_QUARTER = 0.25  # of lapse_after: so often a sign of life is worth a record


class _EnvId(msgspec.Struct):
    env_id: int


_env_id = msgspec.json.Decoder(_EnvId)


@router.post(
    "/register-env",
    response_model=Union[models.EnvRegistered, models.Wait],
    responses=WRITES,
)
async def register_env(env: models.RegisterEnv, request: Request, key: IdempotencyKey = None) -> Response:
    """An environment joins, once the trainer has asked for its first batch."""
    service, run = service_of(request), run_of(request)
    told = env.model_dump()
    resume = told.pop("resume_token")
    known = service.queue(run).epoch.envs.known
    # The same key makes the same token: a retry after a lost answer is somebody who comes back.
    token = f"key-{hashlib.sha256(key.encode()).hexdigest()[:32]}" if key else secrets.token_urlsafe(24)
    replayed = key is not None and known(token) is not None
    if known(resume) is None:
        resume = token if key else None
    registered = await service.submit(run, "register_env", **told, resume_token=resume, token=token)
    if registered is None:
        return answer({"status": "wait for trainer to start"})
    content = {"status": "success", **dataclasses.asdict(registered)}
    return answer(content, headers=REPLAYED if replayed else None)


@router.post("/disconnect-env", response_model=Union[models.Success, models.Failure], responses=WRITES)
async def disconnect_env(env: models.EnvIdentifier, request: Request) -> Response:
    """The environment leaves; what it sent stays."""
    known = await service_of(request).submit(run_of(request), "disconnect_env", env_id=env.env_id)
    return answer({"status": "success"} if known else _unknown(env.env_id))


@router.post("/heartbeat", response_model=Union[models.Success, models.Failure], responses=WRITES)
async def heartbeat(env: models.EnvIdentifier, request: Request) -> Response:
    """A sign of life; groups and /status-env are one too."""
    known = _hear(service_of(request), run_of(request), env.env_id)
    return answer({"status": "success"} if known else _unknown(env.env_id))


@router.get(
    "/status-env",
    response_model=EnvStatus,
    responses=WRITES | {404: {"model": models.Failure, "description": "There is no such environment."}},
    openapi_extra=raw_body(reference(models.EnvIdentifier), "application/json", required=False),
)
async def status_env(
    request: Request,
    env_id: Annotated[models.Int64 | None, Query(description="In the body of the GET, or here.")] = None,
) -> Response:
    """What an environment should know before it starts its next group."""
    if env_id is None:
        body = await request.body()
        try:
            env_id = _env_id.decode(body).env_id
        except (ValueError, RecursionError) as error:
            return invalid(
                ("body", "env_id") if body else ("query", "env_id"), str(error) if body else "Field required"
            )
    service, run = service_of(request), run_of(request)
    status = service.queue(run).env_status(env_id, hold=service.room.nearly_full)
    if status is None:
        return answer(_unknown(env_id), 404)
    _hear(service, run, env_id)
    return answer(status)


def _hear(service: Service, run: str, env_id: int) -> bool:
    """Log a sign of life, now and then. False where there is no such environment."""
    epoch = service.queue(run).epoch
    env = epoch.envs.get(env_id)
    if env is None or not env.connected:
        return False
    if epoch.registration and time.time() - env.last_heard > _QUARTER * epoch.registration.lapse_after:
        service.submit_later(run, "heartbeat", env_id=env_id)
    return True


def _unknown(env_id: int) -> dict[str, str]:
    return {"status": "failure", "error": f"There is no environment {env_id} in this run. Register it (again)."}
