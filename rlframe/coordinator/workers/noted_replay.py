"""The replay buffer as a coordinator's learner sees it: what the learner says to it is noted for the coordinator."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from rlframe.coordinator.messages import Update
from rlframe.replay import BaseReplayBuffer
from rlframe.types import Batch, Step


class NotedReplay(BaseReplayBuffer):
    """Notes each update's keys and priorities, beside the buffer or in its place.

    Where the coordinator draws the keys, its process is the buffer's sampler: priorities, versions and what is too old
    are said to it there, and the replay is not this learner's to save. Elsewhere the learner draws by itself, and says
    all of that to the buffer from here.

    Args:
        replay_buffer: whose items the learner learns from.

    Attributes:
        updates: since they were taken last.
    """

    def __init__(self, replay_buffer: Any) -> None:
        self.spec = replay_buffer.spec
        self._buffer = replay_buffer
        self.is_sampler = not getattr(replay_buffer, "fetches_by_key", False)
        self.is_saved_by_learner = self.is_sampler and getattr(replay_buffer, "is_saved_by_learner", False)
        self.updates: list[Update] = []

    def take_updates(self) -> tuple[Update, ...]:
        """What was noted since the last time."""
        updates, self.updates = self.updates, []
        return tuple(updates)

    # --- what is noted

    def note_update(self, keys: Any, version: int) -> None:
        if len(keys):
            self.updates.append(Update(np.asarray(keys)))
        if self.is_sampler:
            self._buffer.note_update(keys, version)

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        self.updates[-1] = Update(np.asarray(keys), np.asarray(priorities))  # of the update that was noted last
        if self.is_sampler:
            self._buffer.update_priorities(keys, priorities)

    def forget_before(self, version: int) -> None:
        if self.is_sampler:
            self._buffer.forget_before(version)

    # --- what the buffer answers

    def claim_rank(self, num_envs: int | None = None, rank: int | None = None) -> tuple[int, int]:
        return self._buffer.claim_rank(num_envs, rank)

    def open_segment(self, rank: int, num_envs: int) -> None:
        self._buffer.open_segment(rank, num_envs)

    def add(self, env_ids: np.ndarray, step: Step) -> None:
        self._buffer.add(env_ids, step)

    def sample(self) -> Batch | None:
        return self._buffer.sample()

    def make_dataset(self, prefetch: int = 2, timeout: float | None = None) -> Any:
        return self._buffer.make_dataset(prefetch, timeout)

    @property
    def size(self) -> int:
        return self._buffer.size

    def stats(self) -> dict[str, int]:
        return self._buffer.stats()

    def save(self, path: str | os.PathLike[str]) -> None:
        """See the buffer."""
        self._buffer.save(path)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """See the buffer."""
        self._buffer.restore(path)

    def close(self) -> None:
        """It is whose it was before: nothing is closed."""
