"""What a trainer tells and asks, but for its batches."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from rlframe.http.middleware import answer
from rlframe.trajectories.messages import Info, Registered, Registration, RunStatus, WandbInfo
from rlframe.trajectories.service import models
from rlframe.trajectories.service.endpoints import UNAVAILABLE, WRITES, run_of, service_of

router = APIRouter(tags=["trainer"])


@router.post("/register", response_model=Registered, responses=WRITES)
async def register(registration: Registration, request: Request) -> Response:
    """The trainer's settings. The same again are confirmed; others start queue, environments and step afresh."""
    settings = dataclasses.asdict(registration)
    name = str(uuid.uuid4().int)  # 128 bits, which MessagePack cannot carry as a number
    name = await service_of(request).submit(run_of(request), "register", settings=settings, uuid=name)
    return answer(Registered(int(name)))


@router.get("/wandb_info", response_model=WandbInfo)
async def wandb_info(request: Request) -> Response:
    """Group and project of the registration; nulls before."""
    known = service_of(request).queue(run_of(request)).epoch.registration
    return answer(WandbInfo(known.wandb_group, known.wandb_project) if known else WandbInfo())


@router.get("/info", response_model=Info)
async def info(request: Request) -> Response:
    """Sizes of the registration; -1 before."""
    known = service_of(request).queue(run_of(request)).epoch.registration
    return answer(Info(known.batch_size, known.max_token_len) if known else Info())


@router.get("/status", response_model=RunStatus)
async def status(request: Request) -> Response:
    """The step, what is queued, and what waits for what."""
    return answer(service_of(request).queue(run_of(request)).status())


@router.post("/policy-version", response_model=models.Versioned, responses=WRITES)
async def policy_version(body: models.PolicyVersion, request: Request) -> Response:
    """The version that the trainer has now; staleness counts from it."""
    await service_of(request).submit(run_of(request), "set_policy_version", version=body.policy_version)
    return answer({"status": "success", "policy_version": body.policy_version})


@router.post("/pause", response_model=models.Success, responses=UNAVAILABLE)
async def pause(request: Request) -> Response:
    """Tell every environment to hold, for an evaluation."""
    await service_of(request).submit(run_of(request), "pause")
    return answer({"status": "success"})


@router.post("/resume", response_model=models.Success, responses=UNAVAILABLE)
async def resume(request: Request) -> Response:
    """End a pause."""
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
    """Forget the registration, the environments, and every group of this run."""
    if not request.app.state.reset:
        return answer({"detail": "Resets are turned off (--no-reset)."}, 403)
    await service_of(request).submit(run_of(request), "reset")
    return PlainTextResponse("Reset successful")
