"""The limits of a run, which ends before its last step at the first limit that it reaches.

>>> limits = StopConditions(seconds=60.0, eval_return=475.0)
>>> limits.reached(seconds=12.0, eval_return=490.0).text
'an evaluation reached 490, and 475 was wanted'

`TopologyConfig.stop_conditions` has those of `--until-return` and its like; elastic's commanders have those of a job.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class StopReason(NamedTuple):
    """Why a run ends."""

    by: str  # the condition's name, as in `Result.stopped_by`
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopConditions:
    """Limits of a run, which ends at the first that it reaches. None: no such limit."""

    env_steps: int | None = None  # of all actors
    learner_steps: int | None = None  # updates
    seconds: float | None = None  # since this session, or the job, began
    eval_return: float | None = None  # mean return of an evaluation during the run

    @property
    def has_limits(self) -> bool:
        """Return True if there is a limit."""
        return any(getattr(self, field.name) is not None for field in dataclasses.fields(StopConditions))

    def reached(
        self, *, env_steps: int = 0, learner_steps: int = 0, seconds: float = 0.0, eval_return: float | None = None
    ) -> StopReason | None:
        """Return the first limit that is reached, None if none is.

        Args:
            env_steps, learner_steps, seconds: so far.
            eval_return: mean return of the newest evaluation; None before the first.
        """
        if self.env_steps is not None and env_steps >= self.env_steps:
            return StopReason("steps", f"{env_steps:,} of {self.env_steps:,} environment steps were taken")
        if self.learner_steps is not None and learner_steps >= self.learner_steps:
            return StopReason("until_learner_steps", f"{learner_steps:,} of {self.learner_steps:,} updates were made")
        if self.seconds is not None and seconds >= self.seconds:
            return StopReason("until_seconds", f"{seconds:,.0f} of {self.seconds:,.0f} s are over")
        if self.eval_return is not None and eval_return is not None and eval_return >= self.eval_return:
            text = f"an evaluation reached {eval_return:g}, and {self.eval_return:g} was wanted"
            return StopReason("until_return", text)
        return None
