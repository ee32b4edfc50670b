"""Replay buffers: what actors write to and learners sample from."""

from __future__ import annotations

from rlframe.replay.assembler import ItemAssembler
from rlframe.replay.base import (
    BaseReplayBuffer,
    Draw,
    KeyedReplayBuffer,
    ReplayClosedError,
    ReplayReader,
    ReplayWriter,
    as_replay_buffer,
)
from rlframe.replay.local import ReplayBuffer
from rlframe.replay.rate_limiter import RateLimiter
from rlframe.replay.shared_memory import SharedMemReplayBuffer

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
