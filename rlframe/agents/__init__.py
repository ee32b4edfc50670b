"""Agents: the base class, and one file per algorithm."""

from __future__ import annotations

from rlframe.agents.base import Agent, LearnerState
from rlframe.agents.dqn import DQN, DQNConfig
from rlframe.agents.grpo import GRPO
from rlframe.agents.grpo_config import GRPOConfig
from rlframe.agents.impala import IMPALA, IMPALAConfig
from rlframe.agents.ppo import PPO, PPOConfig

__all__ = [
    "DQN",
    "GRPO",
    "IMPALA",
    "PPO",
    "Agent",
    "DQNConfig",
    "GRPOConfig",
    "IMPALAConfig",
    "LearnerState",
    "PPOConfig",
]
