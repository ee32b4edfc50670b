"""What happens to a coordinator (events), and what it has done about it (effects)."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlframe.coordinator.commander import StopReason
from rlframe.coordinator.messages import BatchMeta, Header, Role, Update, WorkerInfo, WorkerKey, WorkerReply


@dataclasses.dataclass(frozen=True)
class _OfWorker:
    worker_id: str
    incarnation: int

    @property
    def key(self) -> WorkerKey:
        """Of the incarnation."""
        return self.worker_id, self.incarnation


# --- events


@dataclasses.dataclass(frozen=True)
class Submitted:
    """The job is to begin, or to go on where the journal ends."""


@dataclasses.dataclass(frozen=True)
class OperatorAnswered:
    """The operator is connected, and lists these live workers."""

    workers: tuple[WorkerInfo, ...]


@dataclasses.dataclass(frozen=True)
class OperatorFailed:
    """The operator cannot be reached."""

    why: str


@dataclasses.dataclass(frozen=True)
class OperatorBroke:
    """The operator raised what is no outage: to ask again would end in the same way."""

    why: str


@dataclasses.dataclass(frozen=True)
class Replied(_OfWorker):
    """A worker answered a call."""

    method: str
    header: Header | None  # of the call; None for a ping
    reply: WorkerReply


@dataclasses.dataclass(frozen=True)
class Unanswered(_OfWorker):
    """A call did not reach a worker, or no answer came in time."""

    method: str
    header: Header | None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class BatchesDrawn:
    """What the replay buffer gave for `DrawBatches`: batches by their keys; none if it has too little, or raised."""

    header: Header
    batches: tuple[BatchMeta, ...]
    why: str = ""  # what it raised


@dataclasses.dataclass(frozen=True)
class Pinned:
    """A version of a policy is kept for an evaluation. -1: there is none yet, or the param store raised."""

    task_id: str
    policy_id: str
    params_version: int


@dataclasses.dataclass(frozen=True)
class Scaled:
    """So many workers of a role are wanted; `by` a person, or by the scaling."""

    role: Role
    count: int
    by: str = "request"


@dataclasses.dataclass(frozen=True)
class Paused:
    """Nothing is to be collected or learned for now."""


@dataclasses.dataclass(frozen=True)
class Resumed:
    """On with it."""


@dataclasses.dataclass(frozen=True)
class Cancelled:
    """The job is to end: nothing is evaluated any more."""

    reason: str
    within: float | None = None  # seconds for tasks to close; None: as the limits say
    by: str = "interrupt"  # see `JobEnding.stopped_by`


@dataclasses.dataclass(frozen=True)
class Ended:
    """The job is to end as at its last step."""

    reason: StopReason


@dataclasses.dataclass(frozen=True)
class EvaluationAsked:
    """The newest version is to be evaluated now."""


@dataclasses.dataclass(frozen=True)
class CheckpointAsked:
    """The learner is to save now."""


@dataclasses.dataclass(frozen=True)
class RestoreAsked:
    """The learner is to go back to its latest checkpoint."""


@dataclasses.dataclass(frozen=True)
class Disconnected:
    """The operator let go of all workers: the last event of a job."""

    why: str = ""  # it could not


@dataclasses.dataclass(frozen=True)
class Ticked:
    """Time has passed."""


# --- effects


@dataclasses.dataclass(frozen=True)
class Send(_OfWorker):
    """Call a worker, after a while; `Replied` or `Unanswered` comes of it."""

    method: str
    header: Header | None
    args: tuple[Any, ...] = ()
    delay: float = 0.0  # seconds


@dataclasses.dataclass(frozen=True)
class Open(_OfWorker):
    """Make a connection to a worker."""

    address: Any


@dataclasses.dataclass(frozen=True)
class Shut(_OfWorker):
    """Drop the connection to a worker. What it still answers changes nothing."""


@dataclasses.dataclass(frozen=True)
class RequestWorkers:
    """Tell the operator how many workers of a role are wanted in all."""

    role: Role
    count: int


@dataclasses.dataclass(frozen=True)
class ReportFailed(_OfWorker):
    """Tell the operator that this incarnation is lost, and to be replaced."""


@dataclasses.dataclass(frozen=True)
class Release(_OfWorker):
    """Tell the operator that this incarnation is not wanted any more."""


@dataclasses.dataclass(frozen=True)
class Disconnect:
    """Let go of the operator, which ends the workers that it owns; `Disconnected` comes of it."""


@dataclasses.dataclass(frozen=True)
class DrawBatches:
    """Draw batches by their keys for a learner; `BatchesDrawn` comes of it."""

    header: Header
    count: int


@dataclasses.dataclass(frozen=True)
class Settle:
    """Tell the replay buffer what became of batches that were drawn.

    Attributes:
        batches: that the learner is done with, or was lost with.
        updates: what was learned from, and the new priorities.
        params_version: that came of it; -1: nothing did.
    """

    batches: tuple[BatchMeta, ...]
    updates: tuple[Update, ...]
    params_version: int = -1


@dataclasses.dataclass(frozen=True)
class SaveReplay:
    """Write the replay buffer to the disk now, where this coordinator is who keeps it."""


@dataclasses.dataclass(frozen=True)
class Pin:
    """Keep the newest version of a policy for an evaluation; `Pinned` comes of it."""

    task_id: str
    policy_id: str


@dataclasses.dataclass(frozen=True)
class Unpin:
    """The version need not be kept for the evaluation any more."""

    policy_id: str
    params_version: int


@dataclasses.dataclass(frozen=True)
class Note:
    """Something that a person may want to know, for the log of events."""

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
