"""Learners hold the parameters, train them from a replay buffer and publish them."""

from rlframe.learners.checkpoints import Checkpointer
from rlframe.learners.learner import Learner, LearnerConfig

__all__ = ["Checkpointer", "Learner", "LearnerConfig"]
