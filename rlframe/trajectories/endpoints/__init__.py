"""The endpoints: the published contract, and beside it what is opt-in."""

from __future__ import annotations

from fastapi import APIRouter

from rlframe.trajectories.endpoints import batches, envs, groups, trainer


def routers(reset: bool) -> list[APIRouter]:
    """Those of one run. `reset`: whether /reset_data does what it says."""
    return [trainer.router, envs.router, groups.router, batches.router, trainer.reset_router(reset)]
