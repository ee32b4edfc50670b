"""Decide what a job does next, and when it has done enough: a pure policy, which can be replaced."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from rlframe.coordinator.messages import Role, StartTask
from rlframe.coordinator.stop_conditions import StopConditions
from rlframe.errors import UsageError


@dataclasses.dataclass(frozen=True)
class View:
    """The progress of a job."""

    env_steps: int
    learner_steps: int
    params_version: int
    seconds: float  # since the job began
    eval_return: float | None = None  # of the newest evaluation
    evaluated_at: int = 0  # environment steps at which the newest evaluation was begun


class Commander(Protocol):
    """Says what workers do. A job's coordinator asks it whenever a worker has answered, or has nothing to do."""

    def task(self, role: Role, index: int, view: View) -> StartTask | None:
        """Return what worker `index` of a role is to do now; None: nothing. Not asked for evaluators.

        Where that is another task than the one that it is at, it closes that one and starts the new one, which takes
        as long as a start does: change in stages. A learner goes on from the checkpoint that it saves then, so its
        `LearnerConfig` needs a checkpoint_dir and resume.
        """

    def evaluation(self, view: View) -> str | None:
        """The policy whose newest version is to be evaluated now; None: none is."""

    def stop(self, view: View) -> str | None:
        """Return why the job is over, None while it is not. Not called again after a reason.

        A `StopReason` also names the condition, which becomes the result's `stopped_by`.
        """

    def final_policy(self) -> str:
        """The policy that is evaluated when the job is over."""


@dataclasses.dataclass(frozen=True)
class TrainOne:
    """Trains one policy until the first of its limits is reached.

    Attributes:
        policy_id: in the param store.
        env_steps: of all collectors.
        learner_steps: updates.
        seconds: since the job began.
        eval_return: mean return of an evaluation.
        eval_every: environment steps between two evaluations; 0: only the last version is evaluated.
    """

    policy_id: str = "main"
    env_steps: int | None = None
    learner_steps: int | None = None
    seconds: float | None = None
    eval_return: float | None = None
    eval_every: int = 0

    def __post_init__(self) -> None:
        for name in ("env_steps", "learner_steps", "seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"TrainOne.{name} must be more than 0, got {value}.")
        if self.eval_every < 0:
            raise UsageError(f"TrainOne.eval_every must be at least 0, got {self.eval_every}.")
        if all(limit is None for limit in (self.env_steps, self.learner_steps, self.seconds, self.eval_return)):
            raise UsageError("TrainOne needs a limit: env_steps, learner_steps, seconds or eval_return.")

    def task(self, role: Role, index: int, view: View) -> StartTask | None:
        """See `Commander`."""
        if role == "learner":
            return StartTask("learn", self.policy_id) if index == 0 else None
        return StartTask("collect", self.policy_id)

    def evaluation(self, view: View) -> str | None:
        """See `Commander`."""
        due = self.eval_every and view.env_steps // self.eval_every > view.evaluated_at // self.eval_every
        return self.policy_id if due else None

    def stop(self, view: View) -> str | None:
        """See `Commander`."""
        limits = StopConditions(self.env_steps, self.learner_steps, self.seconds, self.eval_return)
        return limits.reached(
            env_steps=view.env_steps,
            learner_steps=view.learner_steps,
            seconds=view.seconds,
            eval_return=view.eval_return,
        )

    def final_policy(self) -> str:
        """See `Commander`."""
        return self.policy_id
