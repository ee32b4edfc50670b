"""The trajectory service: environments send groups of sequences, and trainers pull batches of them.

The path of one scored group, from an environment to the learner's batch:

1. An environment has two answers to one prompt, scored 1 and 0. It sends them: `client.post(Group(tokens=[[5, 6, 7],
   [5, 6, 8, 9]], masks=[[-100, -100, 7], [-100, -100, 8, 9]], scores=[1, 0]))`. Masks are -100 in the prompt.
2. The endpoint `/scored_data` (`service/endpoints/data.py`) decodes the group with `service/wire.py` and checks it
   with `service/validation.py`. `Service.submit` appends it to the log of a store (`stores/`): SQLite, Redis or
   memory. When the group is in the log, the environment gets `{"status": "received"}`.
3. `service/state_machine.py` applies the log: `queue.Queue.add` puts the group into a unit queue.
4. The trainer calls `client.batch(lease=120)`. If queued groups have exactly `batch_size` sequences together,
   `Queue.take` leases these groups, and the endpoint `/batch` joins their stored bytes.
5. `client.TrajectoryBuffer.sample` pads the groups to a `TokenBatch`: `tokens [S, T]`, `mask` (1 where masks are not
   -100), `scores [S]`, `group [S]` (here 0 and 0). An ordinary `Learner` with `agents.GRPO` learns from it.
6. After the update, the buffer acknowledges the batch (`Queue.ack`), and the store deletes the payload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlframe.extras import lazy_names

if TYPE_CHECKING:
    from rlframe.trajectories.client.buffer import TrajectoryBuffer
    from rlframe.trajectories.client.client import AsyncTrajectoryClient, TrajectoryClient
    from rlframe.trajectories.client.groups import Group
    from rlframe.types import TokenBatch

# Each public name with its module. A module is imported on first use, because its dependencies are optional.
_PUBLIC = {
    "AsyncTrajectoryClient": "rlframe.trajectories.client.client",
    "Group": "rlframe.trajectories.client.groups",
    "TokenBatch": "rlframe.types",
    "TrajectoryBuffer": "rlframe.trajectories.client.buffer",
    "TrajectoryClient": "rlframe.trajectories.client.client",
}

__all__ = ["AsyncTrajectoryClient", "Group", "TokenBatch", "TrajectoryBuffer", "TrajectoryClient"]
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC, extra="trajectories")
