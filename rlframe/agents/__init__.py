"""Agents: the base class, one file per algorithm, networks, losses and transforms."""

from __future__ import annotations

from rlframe.agents.base import Agent, LearnerState
from rlframe.agents.dqn import DQN, DQNConfig
from rlframe.agents.grpo import GRPO, GRPOConfig
from rlframe.agents.impala import IMPALA, IMPALAConfig
from rlframe.agents.ppo import PPO, PPOConfig
from rlframe.agents.pqn import PQN, PQNConfig
from rlframe.agents.r2d2 import R2D2, R2D2Config
from rlframe.agents.sac import SAC, SACConfig
from rlframe.agents.td3 import TD3, TD3Config
from rlframe.agents.transforms import Normalized

__all__ = [
    "DQN",
    "GRPO",
    "IMPALA",
    "PPO",
    "PQN",
    "R2D2",
    "SAC",
    "TD3",
    "Agent",
    "DQNConfig",
    "GRPOConfig",
    "IMPALAConfig",
    "LearnerState",
    "Normalized",
    "PPOConfig",
    "PQNConfig",
    "R2D2Config",
    "SACConfig",
    "TD3Config",
]
