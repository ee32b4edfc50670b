"""The buffers that the conformance suite runs over. Add a factory, and it is held to the same promises."""

from __future__ import annotations

from typing import Any

from rlframe.replay import BaseReplayBuffer, ReplayBuffer


def local(agent: Any, seed: int = 0) -> BaseReplayBuffer:
    """The buffer in this process."""
    return ReplayBuffer(agent, seed=seed)


FACTORIES = [local]
