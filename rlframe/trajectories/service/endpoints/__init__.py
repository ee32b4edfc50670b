"""The endpoints: the published contract, and beside it what is opt-in."""

from __future__ import annotations

from fastapi import APIRouter

from rlframe.trajectories.service.endpoints import batches, envs, groups, trainer


def routers(reset: bool) -> list[APIRouter]:
    """Those of one run, what is asked for most often first: the others are looked at one by one until one matches.

    `reset`: whether /reset_data does what it says.
    """
    return [groups.router, batches.router, envs.router, trainer.router, trainer.reset_router(reset)]
