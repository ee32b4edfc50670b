"""Replay buffers: what actors write to and learners sample from."""

from __future__ import annotations

from rlframe.replay.base import BaseReplayBuffer
from rlframe.replay.local import ReplayBuffer
from rlframe.replay.shared_memory import SharedMemReplayBuffer

__all__ = ["BaseReplayBuffer", "ReplayBuffer", "SharedMemReplayBuffer"]
