"""The end of a session before its last step: for a callback, or for a limit such as `until_return`."""

from __future__ import annotations

import time

from rlframe.programs.run import Run


class Ending:
    """The decision to end a session before its last step, and the reason.

    Args:
        run: the session.
        by: why, if a process that was restarted had decided it before.

    Attributes:
        by: why, as `Result.stopped_by`; None while the session goes on.
        evaluates: whether the final policy is evaluated.
    """

    def __init__(self, run: Run, by: str | None = None) -> None:
        self._limits, self._began = run.stop_conditions, run.began
        self._has_limits = self._limits.are_set
        self._eval_return: float | None = None
        self.by, self.evaluates = by, True

    def ask(self, by: str, evaluate: bool = True) -> None:
        """End the session after the step under way. The first reason counts, unless a later one excludes evaluating.

        Args:
            by: the reason's name.
            evaluate: evaluate the final policy.
        """
        if not evaluate:
            self.by, self.evaluates = by, False
        self.by = self.by or by

    def note_evaluation(self, return_mean: float) -> None:
        """Take the mean return of an evaluation during the run."""
        self._eval_return = return_mean

    def is_due(self, learner_steps: int) -> bool:
        """Return True if the session must end now."""
        if self.by is None and self._has_limits:
            seconds = time.time() - self._began
            reason = self._limits.reached(learner_steps=learner_steps, seconds=seconds, eval_return=self._eval_return)
            self.by = None if reason is None else reason.by
        return self.by is not None
