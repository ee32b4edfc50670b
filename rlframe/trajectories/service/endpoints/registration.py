"""Endpoints for registration, status, pauses, and heartbeats."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import time
import uuid
from typing import Annotated, Any, Union

from fastapi import APIRouter, Query, Request
from pydantic import ValidationError
from starlette.responses import PlainTextResponse, Response

from rlframe.http.bodies import answer
from rlframe.trajectories.messages import EnvStatus, Info, Registered, Registration, RunStatus, WandbInfo
from rlframe.trajectories.service import models
from rlframe.trajectories.service.endpoints import (
    REPLAYED,
    UNAVAILABLE,
    WRITES,
    IdempotencyKey,
    invalid,
    raw_body,
    run_of,
    service_of,
)
from rlframe.trajectories.service.service import Service

router = APIRouter(tags=["trainer"])


@router.post("/register", response_model=Registered, responses=WRITES)
async def register(registration: Registration, request: Request) -> Response:
    """Register the trainer's settings. If they differ from the registered settings, the run is reset."""
    settings = dataclasses.asdict(registration)
    name = str(uuid.uuid4().int)  # a string, because a number of 128 bits is too large for MessagePack
    name = await service_of(request).submit(run_of(request), "register", settings=settings, uuid=name)
    return answer(Registered(int(name)))


@router.get("/wandb_info", response_model=WandbInfo)
async def wandb_info(request: Request) -> Response:
    """Return the registered Weights & Biases group and project, or nulls before a registration."""
    known = service_of(request).queue(run_of(request)).epoch.registration
    return answer(WandbInfo(known.wandb_group, known.wandb_project) if known else WandbInfo())


@router.get("/info", response_model=Info)
async def info(request: Request) -> Response:
    """Return the registered sizes, or -1 before a registration."""
    known = service_of(request).queue(run_of(request)).epoch.registration
    return answer(Info(known.batch_size, known.max_token_len) if known else Info())


@router.get("/status", response_model=RunStatus)
async def status(request: Request) -> Response:
    """Return the step, queue counts, and the reasons why groups or batches wait."""
    return answer(service_of(request).queue(run_of(request)).status())


@router.post("/policy-version", response_model=models.Versioned, responses=WRITES)
async def policy_version(body: models.PolicyVersion, request: Request) -> Response:
    """Set the trainer's current policy version. The staleness of groups is relative to this version."""
    await service_of(request).submit(run_of(request), "set_policy_version", version=body.policy_version)
    return answer({"status": "success", "policy_version": body.policy_version})


@router.post("/pause", response_model=models.Success, responses=UNAVAILABLE)
async def pause(request: Request) -> Response:
    """Tell all environments to start no new groups, for example during an evaluation."""
    await service_of(request).submit(run_of(request), "pause")
    return answer({"status": "success"})


@router.post("/resume", response_model=models.Success, responses=UNAVAILABLE)
async def resume(request: Request) -> Response:
    """End a pause, so that environments start new groups again."""
    await service_of(request).submit(run_of(request), "resume")
    return answer({"status": "success"})


_RESETS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Reset successful"},
    403: {"description": "Resets are turned off."},
    **UNAVAILABLE,
}


@router.get("/reset_data", responses=_RESETS, response_class=PlainTextResponse)
@router.post("/reset_data", responses=_RESETS, response_class=PlainTextResponse)
async def reset_data(request: Request) -> Response:
    """Delete the registration, the environments, and all groups of this run."""
    if not request.app.state.reset:
        return answer({"detail": "Resets are turned off (--no-reset)."}, 403)
    await service_of(request).submit(run_of(request), "reset")
    return PlainTextResponse("Reset successful")


env_router = APIRouter(tags=["environments"])
_HEARTBEAT_INTERVAL = 0.25  # minimum time between two logged heartbeats, as a fraction of lapse_after


@env_router.post(
    "/register-env",
    response_model=Union[models.EnvRegistered, models.Wait],
    responses=WRITES,
)
async def register_env(env: models.RegisterEnv, request: Request, key: IdempotencyKey = None) -> Response:
    """Register an environment. It has to wait until the trainer requests the first batch."""
    service, run = service_of(request), run_of(request)
    fields = env.model_dump()
    resume = fields.pop("resume_token")
    known = service.queue(run).epoch.envs.find_by_token
    # The resume token is computed from the key. So if an answer is lost, a retry gets the same environment.
    token = f"key-{hashlib.sha256(key.encode()).hexdigest()[:32]}" if key else secrets.token_urlsafe(24)
    replayed = key is not None and known(token) is not None
    if known(resume) is None:
        resume = token if key else None
    registered = await service.submit(run, "register_env", **fields, resume_token=resume, token=token)
    if registered is None:
        return answer({"status": "wait for trainer to start"})
    content = {"status": "success", **dataclasses.asdict(registered)}
    return answer(content, headers=REPLAYED if replayed else None)


@env_router.post("/disconnect-env", response_model=Union[models.Success, models.Failure], responses=WRITES)
async def disconnect_env(env: models.EnvIdentifier, request: Request) -> Response:
    """Disconnect an environment. Its groups stay in the queue."""
    known = await service_of(request).submit(run_of(request), "disconnect_env", env_id=env.env_id)
    return answer({"status": "success"} if known else _unknown(env.env_id))


@env_router.post("/heartbeat", response_model=Union[models.Success, models.Failure], responses=WRITES)
async def heartbeat(env: models.EnvIdentifier, request: Request) -> Response:
    """Record a heartbeat. Groups and /status-env count as heartbeats too."""
    known = _note_heartbeat(service_of(request), run_of(request), env.env_id)
    return answer({"status": "success"} if known else _unknown(env.env_id))


@env_router.get(
    "/status-env",
    response_model=EnvStatus,
    responses=WRITES | {404: {"model": models.Failure, "description": "There is no such environment."}},
    openapi_extra=raw_body(models.EnvIdentifier.model_json_schema(), "application/json", required=False),
)
async def status_env(
    request: Request,
    env_id: Annotated[models.Int64 | None, Query(description="Id of the environment, here or in the body.")] = None,
) -> Response:
    """Return the state of the queue, from which an environment decides whether to start a new group."""
    if env_id is None:
        body = await request.body()
        try:
            env_id = models.EnvIdentifier.model_validate_json(body).env_id
        except ValidationError as error:
            message = error.errors()[0]["msg"] if body else "Field required"
            return invalid(("body" if body else "query", "env_id"), message)
    service, run = service_of(request), run_of(request)
    status = service.queue(run).env_status(env_id, hold=service.nearly_full)
    if status is None:
        return answer(_unknown(env_id), 404)
    _note_heartbeat(service, run, env_id)
    return answer(status)


def _note_heartbeat(service: Service, run: str, env_id: int) -> bool:
    """Log a heartbeat if the last logged heartbeat is old. Return False if there is no such environment."""
    epoch = service.queue(run).epoch
    env = epoch.envs.get(env_id)
    if env is None or not env.connected:
        return False
    if epoch.registration and time.time() - env.last_heard > _HEARTBEAT_INTERVAL * epoch.registration.lapse_after:
        service.submit_later(run, "heartbeat", env_id=env_id)
    return True


def _unknown(env_id: int) -> dict[str, str]:
    return {"status": "failure", "error": f"There is no environment {env_id} in this run. Register it (again)."}
