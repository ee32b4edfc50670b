"""Limits that end a run early.

>>> limits = StopConditions(seconds=60.0, eval_return=475.0)
>>> limits.reached(seconds=12.0, eval_return=490.0).text
'an evaluation reached a return of 490 (limit: 475)'

`TopologyConfig.stop_conditions` contains the limits of options such as `--until-return`. In the elastic topology, the
commander also has limits for its job.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class StopReason(NamedTuple):
    """The reason why a run ends."""

    by: str  # name of the condition, as in `Result.stopped_by`
    text: str  # explanation for users


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopConditions:
    """Limits of a run. The run ends when it reaches the first of them. None means no limit."""

    env_steps: int | None = None  # environment steps of all actors
    learner_steps: int | None = None  # updates of the learner
    seconds: float | None = None  # seconds since the start of this session or job
    eval_return: float | None = None  # mean return of one evaluation during the run

    @property
    def has_limits(self) -> bool:
        """Return True if any limit is set."""
        return any(getattr(self, field.name) is not None for field in dataclasses.fields(StopConditions))

    def reached(
        self, *, env_steps: int = 0, learner_steps: int = 0, seconds: float = 0.0, eval_return: float | None = None
    ) -> StopReason | None:
        """Return the first limit that is reached, or None.

        Args:
            env_steps, learner_steps, seconds: current totals.
            eval_return: mean return of the latest evaluation; None before the first evaluation.
        """
        if self.env_steps is not None and env_steps >= self.env_steps:
            return StopReason("steps", f"{env_steps:,} of {self.env_steps:,} environment steps were taken")
        if self.learner_steps is not None and learner_steps >= self.learner_steps:
            return StopReason("until_learner_steps", f"{learner_steps:,} of {self.learner_steps:,} updates were made")
        if self.seconds is not None and seconds >= self.seconds:
            return StopReason("until_seconds", f"{seconds:,.0f} of {self.seconds:,.0f} s have passed")
        if self.eval_return is not None and eval_return is not None and eval_return >= self.eval_return:
            text = f"an evaluation reached a return of {eval_return:g} (limit: {self.eval_return:g})"
            return StopReason("until_return", text)
        return None
