"""The events that a coordinator's core takes, and the effects that it returns."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlframe.coordinator.messages import BatchMeta, Header, Role, Update, WorkerInfo, WorkerKey, WorkerReply
from rlframe.stop_conditions import StopReason


@dataclasses.dataclass(frozen=True)
class _WorkerKeyed:
    worker_id: str
    incarnation: int

    @property
    def key(self) -> WorkerKey:
        """(worker_id, incarnation)."""
        return self.worker_id, self.incarnation


# --- events


@dataclasses.dataclass(frozen=True)
class Submitted:
    """Begin the job, or continue where the journal ends."""


@dataclasses.dataclass(frozen=True)
class OperatorAnswered:
    """The operator is connected, and lists these live workers."""

    workers: tuple[WorkerInfo, ...]


@dataclasses.dataclass(frozen=True)
class OperatorFailed:
    """The operator cannot be reached."""

    why: str
    is_permanent: bool = False  # it raised an error that another try would raise again


@dataclasses.dataclass(frozen=True)
class Replied(_WorkerKeyed):
    """A worker answered a call."""

    method: str
    header: Header | None  # of the call; None for a ping
    reply: WorkerReply


@dataclasses.dataclass(frozen=True)
class Unanswered(_WorkerKeyed):
    """A call did not reach a worker, or no answer came in time."""

    method: str
    header: Header | None


@dataclasses.dataclass(frozen=True)
class BatchesDrawn:
    """The answer to `DrawBatches`: batches by their keys; none if the buffer has too little, or raised."""

    header: Header
    batches: tuple[BatchMeta, ...]
    why: str = ""  # the error that it raised


@dataclasses.dataclass(frozen=True)
class Pinned:
    """A version of a policy is kept for an evaluation. -1: there is none yet, or the param store raised."""

    task_id: str
    policy_id: str
    params_version: int


@dataclasses.dataclass(frozen=True)
class ScaleRequested:
    """A person, or the scaling, asked for so many workers of a role."""

    role: Role
    count: int
    by: str = "request"  # of a person; "load": the scaling


@dataclasses.dataclass(frozen=True)
class PauseRequested:
    """A person asked to pause collecting and learning, or to end the pause."""

    paused: bool


@dataclasses.dataclass(frozen=True)
class EndRequested:
    """A person, a callback or the program asked to end the job."""

    reason: StopReason
    evaluates: bool = False  # the last version, as at the last step
    within: float | None = None  # seconds for tasks to close; None: as the limits say


@dataclasses.dataclass(frozen=True)
class EvaluationRequested:
    """A person asked to evaluate the newest version."""


@dataclasses.dataclass(frozen=True)
class CheckpointRequested:
    """A person asked the learner to save."""


@dataclasses.dataclass(frozen=True)
class RestoreRequested:
    """A person asked the learner to return to its latest checkpoint."""


@dataclasses.dataclass(frozen=True)
class WorkersEnded:
    """The operator has ended all workers: the last event of a job."""

    why: str = ""  # it could not


@dataclasses.dataclass(frozen=True)
class Ticked:
    """Time has passed."""


# --- effects


@dataclasses.dataclass(frozen=True)
class Send(_WorkerKeyed):
    """Call a worker after `delay`; `Replied` or `Unanswered` follows."""

    method: str
    header: Header | None
    args: tuple[Any, ...] = ()
    delay: float = 0.0  # seconds


@dataclasses.dataclass(frozen=True)
class Connect(_WorkerKeyed):
    """Make a connection to a worker."""

    address: Any


@dataclasses.dataclass(frozen=True)
class Disconnect(_WorkerKeyed):
    """Drop the connection to a worker. Later answers change nothing."""


@dataclasses.dataclass(frozen=True)
class ScaleRole:
    """Tell the operator how many workers of a role are wanted in all."""

    role: Role
    count: int


@dataclasses.dataclass(frozen=True)
class Replace(_WorkerKeyed):
    """Tell the operator to replace this incarnation: it is lost."""


@dataclasses.dataclass(frozen=True)
class Release(_WorkerKeyed):
    """Tell the operator to end this incarnation for good."""


@dataclasses.dataclass(frozen=True)
class EndWorkers:
    """Tell the operator to end all workers; `WorkersEnded` follows."""


@dataclasses.dataclass(frozen=True)
class DrawBatches:
    """Draw batches by their keys for a learner; `BatchesDrawn` follows."""

    header: Header
    count: int


@dataclasses.dataclass(frozen=True)
class FinishBatches:
    """Tell the replay buffer the fate of batches that were drawn.

    Attributes:
        batches: that the learner has finished, or that were lost with it.
        updates: the items that were learned from, and their new priorities.
        params_version: the version after these updates; -1: there were none.
    """

    batches: tuple[BatchMeta, ...]
    updates: tuple[Update, ...]
    params_version: int = -1


@dataclasses.dataclass(frozen=True)
class SaveReplay:
    """Write the replay buffer to the disk now, if this coordinator keeps it."""


@dataclasses.dataclass(frozen=True)
class Pin:
    """Keep the newest version of a policy for an evaluation; `Pinned` follows."""

    task_id: str
    policy_id: str


@dataclasses.dataclass(frozen=True)
class Unpin:
    """The version need not be kept for the evaluation any more."""

    policy_id: str
    params_version: int


@dataclasses.dataclass(frozen=True)
class Note:
    """A line for the log of events, which people read."""

    kind: str
    text: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the run's metrics."""

    env_steps: int
    values: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Over:
    """The job is over."""

    failed: bool
    reason: str
