"""Learners hold the parameters, train them from a replay buffer and publish them."""

from rlframe.learners.checkpoints import Checkpointer
from rlframe.learners.config import DataConfig, LearnerConfig
from rlframe.learners.learner import Learner

__all__ = ["Checkpointer", "DataConfig", "Learner", "LearnerConfig"]
