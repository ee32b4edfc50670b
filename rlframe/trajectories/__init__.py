"""The trajectory service: between environments that send groups of sequences and trainers that pull batches of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlframe.lazy import lazy_names

if TYPE_CHECKING:
    from rlframe.trajectories.client.buffer import TrajectoryBuffer
    from rlframe.trajectories.client.client import AsyncTrajectoryClient, TrajectoryClient
    from rlframe.trajectories.client.groups import Group
    from rlframe.types import TokenBatch

# Public name -> module. Imported on first use: not everyone has what the service and its clients need.
_PUBLIC = {
    "AsyncTrajectoryClient": "rlframe.trajectories.client.client",
    "Group": "rlframe.trajectories.client.groups",
    "TokenBatch": "rlframe.types",
    "TrajectoryBuffer": "rlframe.trajectories.client.buffer",
    "TrajectoryClient": "rlframe.trajectories.client.client",
}

__all__ = ["AsyncTrajectoryClient", "Group", "TokenBatch", "TrajectoryBuffer", "TrajectoryClient"]
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC, extra="trajectories")
