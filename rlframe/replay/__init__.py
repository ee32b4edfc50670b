"""Replay buffers: what actors write to and learners sample from."""

from __future__ import annotations

from rlframe.replay.base import BaseReplayBuffer, Draw, KeyedReplayBuffer, ReplayClosedError, as_replay_buffer
from rlframe.replay.local import ReplayBuffer
from rlframe.replay.shared_memory import SharedMemReplayBuffer

__all__ = [
    "BaseReplayBuffer",
    "Draw",
    "KeyedReplayBuffer",
    "ReplayBuffer",
    "ReplayClosedError",
    "SharedMemReplayBuffer",
    "as_replay_buffer",
]
