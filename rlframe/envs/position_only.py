"""CartPole without velocities. Agents need a memory. POPGym and RLlib have similar environments."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

_POSITIONS = [0, 2]  # indices in CartPole's observation: position of the cart, angle of the pole


class PositionOnlyCartPole(CartPoleEnv):
    """CartPole-v1 with an observation `[2]` float32: the cart's position (m) and the pole's angle (rad).

    A network without memory cannot compute in which direction the pole falls.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        box: Any = self.observation_space
        self.observation_space = gymnasium.spaces.Box(box.low[_POSITIONS], box.high[_POSITIONS], dtype=np.float32)

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """See CartPole-v1."""
        observation, info = super().reset(**kwargs)
        return observation[_POSITIONS], info

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        """See CartPole-v1."""
        observation, reward, terminated, truncated, info = super().step(action)
        return observation[_POSITIONS], reward, terminated, truncated, info
