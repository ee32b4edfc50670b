"""The options of a Learner."""

from __future__ import annotations

import dataclasses

from rlframe.errors import UsageError, check_above, check_at_least


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    """How a Learner starts, stops and saves."""

    seed: int = 0
    max_learner_steps: int | None = None  # `run()` ends there, and the Launchpad program with it; None: at `stop()`
    ends_program: bool = True  # False: at max_learner_steps it is as after `finish()`
    checkpoint_dir: str | None = None  # None: nothing is saved
    checkpoint_every: int = 10_000  # learner steps between two checkpoints of `run()`
    checkpoint_seconds: float = 30.0  # or so long, whichever is shorter: what a learner that is killed loses
    checkpoints_kept: int = 3
    resume: bool = False  # begin with the latest checkpoint, where there is one
    log_every: int = 100  # learner steps between two rows of `run()`'s logger

    def __post_init__(self) -> None:
        check_at_least(self, 1, "checkpoint_every", "checkpoints_kept", "log_every")
        check_above(self, 0, "checkpoint_seconds")
        if self.resume and not self.checkpoint_dir:
            raise UsageError("LearnerConfig.resume needs a checkpoint_dir.")
