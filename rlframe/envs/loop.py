"""`type='loop'`: the environments one after another in the caller's thread."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlframe.envs.frames import FrameRing
from rlframe.envs.group import EnvGroup, EnvState
from rlframe.metrics.sums import Sums
from rlframe.types import TimeStep


class LoopPool:
    """Steps one group of environments in the caller's thread."""

    def __init__(self, group: EnvGroup):
        self._group = group
        self.num_envs = len(group.envs)
        self.observation_spec = group.observation_spec
        self.action_spec = group.action_spec
        self._ring = FrameRing(group.layout, self.num_envs, [(0, self.num_envs)])

    def reset(self) -> TimeStep:
        frame = self._ring.take()
        self._group.reset(frame.rows(0, self.num_envs))
        return frame.timestep()

    def step(self, actions: np.ndarray) -> TimeStep:
        frame = self._ring.take()
        self._group.step(actions, frame.rows(0, self.num_envs))
        return frame.timestep()

    def get_state(self) -> list[EnvState] | None:
        return self._group.get_state()

    def set_state(self, states: list[EnvState]) -> None:
        self._group.set_state(states)

    def sums(self) -> Sums:
        return self._group.log.sums()

    def progress(self) -> Any:
        return self._group.at[0]

    def close(self) -> None:
        self._group.close()
