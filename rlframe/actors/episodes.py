"""Returns and lengths of the episodes that a batch of environments plays."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlframe.types import FIRST, LAST, Logs, TimeStep

_FIRST_BYTE, _LAST_BYTE = bytes([FIRST]), bytes([LAST])


class EpisodeStatistics:
    """Sums rewards per environment, and counts steps and episodes.

    Args:
        num_envs: environments in the pool.
    """

    def __init__(self, num_envs: int) -> None:
        self.env_steps = 0
        self.episodes = 0
        self.return_sum = self.length_sum = 0.0  # of the episodes that ended
        self._returns = np.zeros(num_envs, np.float64)
        self._lengths = np.zeros(num_envs, np.int64)

    def update(
        self, timestep: TimeStep, indices: np.ndarray | None = None, rewards: np.ndarray | None = None
    ) -> Logs | None:
        """Counts the timesteps that followed one action each.

        Args:
            timestep: [B, ...]; a FIRST counts as no step.
            indices: [B], the environments that they are of; None: all, in order.
            rewards: [B], to sum up; None: those of the timestep.

        Returns:
            `episode_return`, `episode_length` (means) and `episodes` of those that ended; None if none did.
        """
        step_type = timestep.step_type
        types = step_type.tobytes()  # counting bytes takes a tenth of the time that comparing a small array does
        began, ended = types.count(_FIRST_BYTE), types.count(_LAST_BYTE)
        self.env_steps += len(types) - began
        rewards = timestep.reward if rewards is None else rewards
        if indices is None:
            self._returns += rewards
            self._lengths += 1
        else:
            self._returns[indices] += rewards
            self._lengths[indices] += 1
        if began:
            first = np.flatnonzero(step_type == FIRST)
            which = first if indices is None else indices[first]
            self._returns[which], self._lengths[which] = 0.0, 0
        if not ended:
            return None
        self.episodes += ended
        last = step_type == LAST
        which = np.flatnonzero(last) if indices is None else indices[last]
        returns, lengths = float(self._returns[which].sum()), float(self._lengths[which].sum())
        self.return_sum += returns
        self.length_sum += lengths
        return {"episode_return": returns / ended, "episode_length": lengths / ended, "episodes": ended}

    def get_state(self) -> dict[str, Any]:
        """Counters and running sums, as numpy and ints."""
        return {
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "returns": self._returns.copy(),
            "lengths": self._lengths.copy(),
        }

    def set_state(self, state: dict[str, Any], resets: bool) -> None:
        """Takes over what `get_state` gave; `resets`: the episodes under way are lost."""
        self.env_steps, self.episodes = state["env_steps"], state["episodes"]
        if not resets:
            self._returns, self._lengths = state["returns"].copy(), state["lengths"].copy()
