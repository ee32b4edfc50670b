"""Replay buffers: actors add steps, and learners sample batches of items.

These calls move one transition through a replay buffer in one process (`local.py: ReplayBuffer`):

    replay = ReplayBuffer(agent, seed=1)                # agent.replay_spec: n_step 3, prioritized, batch_size 32
    rank, _ = replay.claim_rank(num_envs=8)             # a writer with 8 environments
    replay.add(env_ids, step)                           # step: a `Step` of [8, ...]
      StepStore.add                                     # steps.py: writes to 8 slots of the shared ring (timeline.py)
        Transitions.put                                 # items.py: completes the items that began 3 steps before
        PrioritizedTable.append_block                   # tables.py: adds these items with the highest priority
    batch = replay.sample()                             # a `Batch` of 32 items, or None
      RateLimiter.items_to_sample                       # rate_limiter.py: decides if a batch can be sampled now
      PrioritizedTable.draw                             # tables.py, sum_tree.py: draws items and their probabilities
      StepStore.read -> Transitions.assemble            # items.py: gathers observations, returns and discounts
    replay.update_priorities(batch.keys, priorities)

`base.py` defines the protocols, and the class `Dataset`, which draws batches ahead of time. `layout.py` and
`tree_store.py` define the arrays, `frames.py` stores stacked frames, and `replay_files.py` writes buffers to disk.

There are three other buffers: `shared_memory/` connects the processes of one machine, `service/` runs the replay in
separate nodes, and `reverb/` uses a Reverb server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlframe.extras import lazy_names
from rlframe.replay.base import (
    BaseReplayBuffer,
    Draw,
    KeyedReplayBuffer,
    ReplayClosedError,
    ReplayReader,
    ReplayWriter,
)
from rlframe.replay.local import ReplayBuffer
from rlframe.replay.rate_limiter import ItemCounts, RateLimiter
from rlframe.replay.steps import ItemAssembler

if TYPE_CHECKING:
    from rlframe.replay.shared_memory import SharedMemReplayBuffer

__all__ = [
    "BaseReplayBuffer",
    "Draw",
    "ItemAssembler",
    "ItemCounts",
    "KeyedReplayBuffer",
    "RateLimiter",
    "ReplayBuffer",
    "ReplayClosedError",
    "ReplayReader",
    "ReplayWriter",
    "SharedMemReplayBuffer",
    "as_replay_buffer",
]


__getattr__, __dir__ = lazy_names(__name__, {"SharedMemReplayBuffer": "rlframe.replay.shared_memory"})


def as_replay_buffer(target: Any, specs: Callable[[], Any]) -> Any:
    """Convert a `reverb.Client` to a replay buffer. Return a replay buffer without change.

    Args:
        target: a replay buffer, or a client of a Reverb server.
        specs: function that returns an object with `replay_spec` and `step_spec`. It is called only for a client.
    """
    # Compare the name of the module instead of the class, because importing Reverb is slow.
    if type(target).__module__.partition(".")[0] != "reverb":
        return target
    from rlframe.replay.reverb import ReverbReplayBuffer

    return ReverbReplayBuffer(specs(), target)
