"""Configuration of a coordinator: deadlines, bounds, and the recorder of a run's metrics."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlframe.coordinator.messages import ROLES
from rlframe.errors import FieldError, UsageError, check_above, check_at_least, suggest
from rlframe.metrics.rows import ActorCounts


@dataclasses.dataclass(frozen=True)
class Limits:
    """Deadlines and intervals of a job, in seconds unless the comment names another unit."""

    ping_every: float = 3.0
    suspect_after: float = 9.0  # silence after which a worker is SUSPECT
    lost_after: float = 17.0  # silence after which a worker is LOST
    lost_after_starting: float = 60.0  # `lost_after` while a task starts, because compilation can block replies
    starting_deadline: float = 300.0  # time for a worker to appear and to reply to its first ping
    progress_deadline: float = 120.0  # time to save before an evaluation; time of failed draws that ends the job
    close_deadline: float = 60.0  # time to close all tasks at the job's end, including the last checkpoint
    evaluation_deadline: float = 1800.0  # time for the last evaluation
    healthy_after: float = 60.0  # if a task has run for this time, its failure count is reset
    max_failures: int = 3  # maximum number of consecutive failures of a task, or of consecutive failed worker starts
    retry_after: float = 0.2  # delay before a call is repeated that got no reply
    grant: int = 32  # maximum number of batches that the learner trains on in one call
    slice: float = 0.1  # time that a collector collects in one call
    row_every: int = 1000  # environment steps between two rows of the metrics

    def __post_init__(self) -> None:
        check_at_least(self, 0, "max_failures")
        check_above(self, 0, *(field.name for field in dataclasses.fields(self) if field.name != "max_failures"))
        if not self.ping_every < self.suspect_after < self.lost_after <= self.lost_after_starting:
            raise UsageError(
                "Limits must satisfy ping_every < suspect_after < lost_after <= lost_after_starting, got "
                f"{self.ping_every:g}, {self.suspect_after:g}, {self.lost_after:g} and {self.lost_after_starting:g} s."
            )


@dataclasses.dataclass(frozen=True)
class CoordinatorConfig:
    """Configuration of a coordinator and its job."""

    path: str  # directory of the journal
    job_id: str = ""  # id of the job; a journal with another id is not continued
    counts_before: ActorCounts = dataclasses.field(default_factory=ActorCounts)  # totals of the run's earlier sessions
    min_collectors: int = 1
    max_collectors: int = 8
    collectors: int = 0  # number of collectors at the start; 0 means `min_collectors`
    cores: int | None = None  # maximum number of collectors for automatic scaling; None means this machine's cores
    mean_staleness: float | None = None  # mean staleness in versions above which scaling removes collectors
    stop_within: float = 6.0  # seconds that tasks have to close when the program ends
    evaluates: bool = True  # evaluate the last version at the end of the job
    run_info: dict[str, Any] = dataclasses.field(default_factory=dict)  # agent, env, run_dir and until; status shows it
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

    def check_count(self, role: str, n: Any) -> None:
        """Raise `UsageError` if the role does not exist, and `FieldError` if the role cannot have `n` workers."""
        if role not in ROLES:
            raise UsageError(f"There is no role {role!r}; the roles are {', '.join(ROLES)}.{suggest(str(role), ROLES)}")
        least, most = (self.min_collectors, self.max_collectors) if role == "collector" else (1, 1)
        if isinstance(n, bool) or not isinstance(n, int) or not least <= n <= most:
            bounds = f"between {least} and {most}" if least < most else f"{least}"
            raise FieldError(f"The number of workers of the role {role} must be {bounds}, got {n!r}.", "n")


class JobRecorder:
    """Base class of the writers of a run's metrics. It writes nothing. The coordinator's thread calls the methods."""

    def begin(self, counts: ActorCounts) -> None:
        """Start or resume a job at these counts. Drop the metrics rows of later steps."""

    def write(self, env_steps: int, row: dict[str, Any], counts: ActorCounts) -> None:
        """Write a row of metrics and the collectors' counts."""

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the result: the job's status, `failed`, `reason`, and the evaluation (or None)."""
