"""The buffers that the conformance suite runs over. Add a factory, and it is held to the same promises."""

from __future__ import annotations

from typing import Any

from rlframe.replay import BaseReplayBuffer, ReplayBuffer, SharedMemReplayBuffer


def local(agent: Any, seed: int = 0, writers: int = 1) -> BaseReplayBuffer:
    """The buffer in this process."""
    return ReplayBuffer(agent, seed=seed)


def shared_memory(agent: Any, seed: int = 0, writers: int = 1) -> BaseReplayBuffer:
    """The buffer between processes, used from one; other processes: `test_shared_memory.py`."""
    return SharedMemReplayBuffer(agent, seed=seed, num_writers=writers)


FACTORIES = [local, shared_memory]
