"""Decide what a job does next, and when it has done enough. The policy has no I/O, and can be replaced."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from rlframe.coordinator.messages import Role, StartTask
from rlframe.errors import UsageError, check_above, check_at_least
from rlframe.stop_conditions import StopConditions, StopReason


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
    """Decides what workers do. A coordinator asks it whenever a worker has answered, or has nothing to do."""

    def task(self, role: Role, index: int, view: View) -> StartTask | None:
        """Return the task of worker `index` of a role; None: nothing to do. Not called for evaluators.

        If it differs from the worker's present task, the worker closes that task and starts the new one, which takes
        as long as any start: change in stages. A learner saves a checkpoint then and continues from it, so its
        `LearnerConfig` needs a checkpoint_dir and resume.
        """

    def evaluation(self, view: View) -> str | None:
        """Return the policy whose newest version must be evaluated now; None: no evaluation is due."""

    def stop(self, view: View) -> StopReason | None:
        """Return why the job is over, None while it is not. Not called again after a reason."""

    def final_policy(self) -> str:
        """Return the policy that is evaluated when the job is over."""


@dataclasses.dataclass(frozen=True)
class TrainOne(StopConditions):
    """Trains one policy until the first of its limits is reached. See `StopConditions`.

    Attributes:
        policy_id: in the param store.
        eval_every: environment steps between two evaluations; 0: only the last version is evaluated.
    """

    policy_id: str = "main"
    eval_every: int = 0

    def __post_init__(self) -> None:
        check_above(self, 0, "env_steps", "learner_steps", "seconds")
        check_at_least(self, 0, "eval_every")
        if not self.has_limits:
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

    def stop(self, view: View) -> StopReason | None:
        """See `Commander`."""
        return self.reached(
            env_steps=view.env_steps,
            learner_steps=view.learner_steps,
            seconds=view.seconds,
            eval_return=view.eval_return,
        )

    def final_policy(self) -> str:
        """See `Commander`."""
        return self.policy_id
