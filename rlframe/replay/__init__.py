"""Replay buffers: what actors write to and learners sample from.

One transition, in the buffer of one process (`local.py: ReplayBuffer`):

    replay = ReplayBuffer(agent, seed=1)                # agent.replay_spec: n_step 3, prioritized, batch_size 32
    rank, _ = replay.claim_rank(num_envs=8)             # a writer with 8 environments
    replay.add(env_ids, step)                           # step: a `Step` of [8, ...]
      StepStore.add                                     # steps.py: in 8 slots of the ring of all writers (timeline.py)
        Transitions.put                                 # items.py: this step completes the items of 3 steps before
        PrioritizedTable.append_block                   # tables.py: they can be drawn, with the highest priority
    batch = replay.sample()                             # a `Batch` of 32 items, or None
      RateLimiter.items_to_sample                       # rate_limiter.py: may a batch be sampled now?
      PrioritizedTable.draw                             # tables.py, sum_tree.py: which items, with which probability
      StepStore.read -> Transitions.assemble            # items.py: gathers observations, returns and discounts
    replay.update_priorities(batch.keys, priorities)

`base.py` has the protocols and `Dataset`, which draws ahead. `layout.py` and `tree_store.py` have the arrays,
`frames.py` those of stacked frames, and `replay_files.py` the files. The other buffers use the same `StepStore` and
`RateLimiter`: `shared_memory/` between processes of a machine, `service/` in nodes of their own, `reverb/` on a Reverb
server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from rlframe.replay.shared_memory import SharedMemReplayBuffer
from rlframe.replay.steps import ItemAssembler

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


def as_replay_buffer(target: Any, specs: Callable[[], Any]) -> Any:
    """Return a replay buffer for an argument that may be one, or a `reverb.Client`.

    Args:
        target: a replay buffer, which is returned as it is, or a client of a Reverb server.
        specs: returns an object with the agent's `replay_spec` and `step_spec`; called for a client only.
    """
    # By its module's name: only a process with a client has imported Reverb.
    if type(target).__module__.partition(".")[0] != "reverb":
        return target
    from rlframe.replay.reverb import ReverbReplayBuffer

    return ReverbReplayBuffer(specs(), target)
