"""Learners hold the parameters, train them from a replay buffer and publish them."""

from rlframe.learners.checkpoints import Checkpointer
from rlframe.learners.config import LearnerConfig
from rlframe.learners.learner import Learner

__all__ = ["Checkpointer", "Learner", "LearnerConfig"]
