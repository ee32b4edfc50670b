"""Choose the tasks of a job, and decide when the job is over. A commander does no I/O and can be replaced."""

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
    seconds: float  # seconds since the job began
    eval_return: float | None = None  # mean return of the newest evaluation
    evaluated_at: int = 0  # environment steps at the start of the newest evaluation


class Commander(Protocol):
    """Chooses the workers' tasks. The coordinator calls it after each reply of a worker, and for each idle worker."""

    def task(self, role: Role, index: int, view: View) -> StartTask | None:
        """Return the task for worker number `index` of a role, or None for no task. Not called for evaluators.

        If the task differs from the worker's current task, the worker closes the current task and starts the new one.
        A start is slow, so change tasks rarely. A learner saves a checkpoint when it closes a task, and continues from
        it in the next task. This requires `checkpoint_dir` and `resume` in its `LearnerConfig`.
        """

    def evaluation(self, view: View) -> str | None:
        """Return the id of the policy to evaluate now, or None if no evaluation is due."""

    def stop(self, view: View) -> StopReason | None:
        """Return the reason to end the job, or None to continue. After the first reason, this is not called again."""

    def final_policy(self) -> str:
        """Return the id of the policy to evaluate at the end of the job."""


@dataclasses.dataclass(frozen=True)
class TrainOne(StopConditions):
    """A commander that trains one policy until a limit is reached. See `StopConditions`.

    Attributes:
        policy_id: The policy's id in the param store.
        eval_every: Environment steps between two evaluations; 0 evaluates only the last version.
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
