"""What a coordinator is given beside its parts: its bounds and deadlines, and where a run's metrics go."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from rlframe.coordinator.core.limits import Limits
from rlframe.errors import UsageError


@dataclasses.dataclass(frozen=True)
class CoordinatorConfig:
    """What a coordinator holds a job to."""

    path: str  # a folder for its journal
    job_id: str = ""  # a journal of another job is not gone on with
    before: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # what was collected before the job
    min_collectors: int = 1
    max_collectors: int = 8
    collectors: int = 0  # to begin with; 0: the least
    max_staleness: float | None = None  # versions, on average, above which there are fewer collectors; None: no bound
    stop_within: float = 6.0  # seconds for tasks to close when the program is told to end
    describes: dict[str, Any] = dataclasses.field(default_factory=dict)  # agent, env, run_dir, until: for its status
    limits: Limits = dataclasses.field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 1 <= self.min_collectors <= self.max_collectors:
            raise UsageError(
                "A coordinator needs 1 <= min_collectors <= max_collectors, got "
                f"{self.min_collectors} and {self.max_collectors}."
            )
        if self.collectors and not self.min_collectors <= self.collectors <= self.max_collectors:
            raise UsageError(
                f"CoordinatorConfig.collectors must be between {self.min_collectors} and {self.max_collectors}, got "
                f"{self.collectors}."
            )


class Recorder(Protocol):
    """Where a run's metrics go. Called by the coordinator's own thread."""

    def begin(self, env_steps: int) -> None:
        """The job begins, or goes on, at so many environment steps: rows after that are of the past."""

    def write(self, env_steps: int, values: dict[str, Any], census: dict[str, list[float]]) -> None:
        """Takes a row, and what each collector has done: "rank.incarnation" -> its counters."""

    def finish(self, summary: dict[str, Any]) -> None:
        """The job is over: failed, reason, evaluation (or None), and what the status says of the job."""
