"""Agents: the base class, and one file per algorithm."""

from __future__ import annotations

from rlframe.agents.base import Agent, LearnerState
from rlframe.agents.ppo import PPO, PPOConfig

__all__ = ["PPO", "Agent", "LearnerState", "PPOConfig"]
