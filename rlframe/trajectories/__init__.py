"""The trajectory service: between environments that send groups of sequences and trainers that pull batches of them.

One scored group, from an environment to the learner's batch:

1. An environment has two answers to one prompt, scored 1 and 0, and sends them: `client.post(Group(tokens=[[5, 6, 7],
   [5, 6, 8, 9]], masks=[[-100, -100, 7], [-100, -100, 8, 9]], scores=[1, 0]))`. Masks are -100 in the prompt.
2. The endpoint `/scored_data` (`service/endpoints/groups.py`) has `service/wire.py` decode it and
   `service/validation.py` check it. `Service.submit` appends it to the log of a store (`stores/`): SQLite, Redis or
   memory. Once the log has it, the environment gets `{"status": "received"}`.
3. `service/state_machine.py` applies the log: `queue.Queue.add` puts the group into a lane.
4. The trainer asks with `client.batch(lease=120)`. If the queue can form exactly `batch_size` sequences, `Queue.take`
   leases them, and the endpoint `/batch` joins their stored bytes.
5. `client.TrajectoryBuffer.sample` pads them to a `TokenBatch`: `tokens [S, T]`, `mask` (1 where masks are not -100),
   `scores [S]`, `group [S]` (here 0 and 0). An ordinary `Learner` with `agents.GRPO` learns from it.
6. After the update the buffer acknowledges the batch (`Queue.ack`), and the store drops the payload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlframe.extras import lazy_names

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
