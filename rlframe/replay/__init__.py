"""Replay buffers: what actors write to and learners sample from."""

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
from rlframe.replay.rate_limiter import RateLimiter
from rlframe.replay.shared_memory import SharedMemReplayBuffer
from rlframe.replay.steps import ItemAssembler

__all__ = [
    "BaseReplayBuffer",
    "Draw",
    "ItemAssembler",
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
