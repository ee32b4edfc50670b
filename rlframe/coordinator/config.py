"""The configuration of a coordinator: deadlines, bounds, and the recorder of a run's metrics."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from rlframe.coordinator.messages import ROLES
from rlframe.errors import UsageError, check_above, check_at_least, suggest
from rlframe.metrics.rows import ActorCounts


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds, unless said otherwise."""

    ping_every: float = 3.0
    suspect_after: float = 9.0
    lost_after: float = 17.0
    lost_after_starting: float = 60.0  # while a task starts: a compilation may keep its process from answering
    starting_deadline: float = 300.0  # for a worker to come, and for its task to start
    progress_deadline: float = 120.0  # for a learner to save before an evaluation, and for a replay buffer that raises
    close_deadline: float = 60.0  # for tasks to be closed when the job ends, the last checkpoint among them
    evaluation_deadline: float = 1800.0  # for the last evaluation
    healthy_after: float = 60.0  # of running, and getting on, after which a task's failures are forgotten
    max_failures: int = 3  # of a task, and of a worker's starts, in a row
    retry_after: float = 0.2  # before a call that was not answered is repeated
    grant: int = 32  # most batches of one call of a learner
    slice: float = 0.1  # of collecting, between two answers of a collector
    row_every: int = 1000  # environment steps between two rows of the metrics

    def __post_init__(self) -> None:
        check_at_least(self, 0, "max_failures")
        check_above(self, 0, *(field.name for field in dataclasses.fields(self) if field.name != "max_failures"))
        if not self.ping_every < self.suspect_after < self.lost_after <= self.lost_after_starting:
            raise UsageError(
                "Limits must rise from ping_every over suspect_after and lost_after to lost_after_starting, got "
                f"{self.ping_every:g}, {self.suspect_after:g}, {self.lost_after:g} and {self.lost_after_starting:g} s."
            )


@dataclasses.dataclass(frozen=True)
class CoordinatorConfig:
    """Bounds of a job."""

    path: str  # a folder for its journal
    job_id: str = ""  # a journal of another job is not continued
    counts_before: ActorCounts = dataclasses.field(default_factory=ActorCounts)  # collected before the job
    min_collectors: int = 1
    max_collectors: int = 8
    collectors: int = 0  # to begin with; 0: the least
    cores: int | None = None  # that collectors share: scaling starts no more collectors; None: this machine's
    mean_staleness: float | None = None  # versions, on average, above which there are fewer collectors; None: no bound
    stop_within: float = 6.0  # seconds for tasks to close when the program ends
    evaluates: bool = True  # the last version, once the job is over
    run_info: dict[str, Any] = dataclasses.field(default_factory=dict)  # agent, env, run_dir, until: for its status
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
        """Raise `UsageError` if there is no such role, or there cannot be `n` workers of it."""
        if role not in ROLES:
            raise UsageError(f"There is no role {role!r}; there are {', '.join(ROLES)}.{suggest(str(role), ROLES)}")
        least, most = (self.min_collectors, self.max_collectors) if role == "collector" else (1, 1)
        if isinstance(n, bool) or not isinstance(n, int) or not least <= n <= most:
            bounds = f"{least} to {most}" if least < most else f"{least}"
            raise UsageError(f"There can be {bounds} workers of the role {role}, not {n!r}.")


class JobRecorder(Protocol):
    """Writes a run's metrics. Called by the coordinator's own thread."""

    def begin(self, counts: ActorCounts) -> None:
        """Begin at these counts, in a new job or a resumed one. Drop rows of later steps."""

    def write(self, env_steps: int, row: dict[str, Any], counts: ActorCounts) -> None:
        """Write a row, and the counts of the collectors."""

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the result: failed, reason, evaluation (or None), and the status of the job."""
