"""The trajectory service: between environments that send groups of sequences and trainers that pull batches of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlframe import extras

if TYPE_CHECKING:
    from rlframe.trajectories.client.buffer import TrajectoryBuffer
    from rlframe.trajectories.client.client import AsyncTrajectoryClient, TrajectoryClient
    from rlframe.trajectories.client.groups import Group
    from rlframe.types import TokenBatch

# Public name -> module. Resolved on first use (PEP 562): not everyone has what the service and its clients need.
_PUBLIC = {
    "AsyncTrajectoryClient": "rlframe.trajectories.client.client",
    "Group": "rlframe.trajectories.client.groups",
    "TokenBatch": "rlframe.types",
    "TrajectoryBuffer": "rlframe.trajectories.client.buffer",
    "TrajectoryClient": "rlframe.trajectories.client.client",
}

__all__ = ["AsyncTrajectoryClient", "Group", "TokenBatch", "TrajectoryBuffer", "TrajectoryClient"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rlframe.trajectories' has no attribute {name!r}")
    with extras.needed(f"rlframe.trajectories.{name}", "trajectories"):
        return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
