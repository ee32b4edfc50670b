"""The deadlines of a coordinator, and what it holds a job to."""

from __future__ import annotations

import dataclasses

from rlframe.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds, unless said otherwise."""

    ping_every: float = 3.0
    suspect_after: float = 9.0
    lost_after: float = 17.0
    lost_after_starting: float = 60.0  # while a task starts: a compilation may keep its process from answering
    starting_deadline: float = 300.0  # for a worker to come, and for its task to start
    progress_deadline: float = 120.0  # for a worker that answers, but says of the same call again that it is not done
    close_deadline: float = 60.0  # for tasks to be closed when the job ends, the last checkpoint among them
    evaluation_deadline: float = 1800.0  # for the last evaluation
    healthy_after: float = 60.0  # of running, and getting on, after which a task's failures are forgotten
    max_failures: int = 3  # of a task, and of a worker's starts, in a row
    retry_after: float = 0.2  # before a call that was not answered is repeated
    grant: int = 32  # batches that a learner is told to learn from at once
    slice: float = 0.1  # of collecting, between two answers of a collector
    row_every: int = 1000  # environment steps between two rows of the metrics

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 0 or (value == 0 and field.name != "max_failures"):
                raise UsageError(f"Limits.{field.name} must be more than 0, got {value}.")
        if not self.ping_every < self.suspect_after < self.lost_after <= self.lost_after_starting:
            raise UsageError(
                "Limits must rise from ping_every over suspect_after and lost_after to lost_after_starting, got "
                f"{self.ping_every:g}, {self.suspect_after:g}, {self.lost_after:g} and {self.lost_after_starting:g} s."
            )
