"""The events (inputs) and effects (outputs) of a coordinator's core."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlframe.coordinator.messages import BatchMeta, Header, Role, Update, WorkerInfo, WorkerKey, WorkerReply
from rlframe.stop_conditions import StopReason


@dataclasses.dataclass(frozen=True)
class _WorkerKeyed:
    key: WorkerKey


# --- events


class Event:
    """Something that happened: an input of the core."""


@dataclasses.dataclass(frozen=True)
class Submitted(Event):
    """The job starts. A job that is restored from the journal continues."""


@dataclasses.dataclass(frozen=True)
class OperatorAnswered(Event):
    """The operator answered with a list of its live workers."""

    workers: tuple[WorkerInfo, ...]


@dataclasses.dataclass(frozen=True)
class OperatorFailed(Event):
    """The operator cannot be reached."""

    why: str
    is_permanent: bool = False  # True if a retry would fail in the same way


@dataclasses.dataclass(frozen=True)
class Replied(_WorkerKeyed, Event):
    """A worker replied to a call."""

    method: str
    header: Header | None  # header of the call; None for `ping` and `resources`
    reply: WorkerReply


@dataclasses.dataclass(frozen=True)
class Unanswered(_WorkerKeyed, Event):
    """A call did not reach its worker, or no reply arrived in time."""

    method: str
    header: Header | None


@dataclasses.dataclass(frozen=True)
class BatchesDrawn(Event):
    """The result of `DrawBatches`. It has no batches if the buffer contained too little data or raised an exception."""

    header: Header
    batches: tuple[BatchMeta, ...]
    why: str = ""  # text of the buffer's exception, if any


@dataclasses.dataclass(frozen=True)
class Pinned(Event):
    """The result of `Pin`."""

    task_id: str
    policy_id: str
    params_version: int  # -1 if the policy has no published version, or if the param store raised an exception


@dataclasses.dataclass(frozen=True)
class ScaleRequested(Event):
    """A person or the automatic scaling requested a number of workers of a role."""

    role: Role
    count: int
    by: str = "request"  # "request" for a person, "load" for the automatic scaling


@dataclasses.dataclass(frozen=True)
class PauseRequested(Event):
    """A person requested a pause of collecting and learning, or the end of the pause."""

    paused: bool


@dataclasses.dataclass(frozen=True)
class EndRequested(Event):
    """A person, a callback or the program requested the end of the job."""

    reason: StopReason
    evaluates: bool = False  # if True, evaluate the last version
    within: float | None = None  # seconds that tasks have to close; None means `Limits.close_deadline`


@dataclasses.dataclass(frozen=True)
class EvaluationRequested(Event):
    """A person requested an evaluation of the newest version."""


@dataclasses.dataclass(frozen=True)
class CheckpointRequested(Event):
    """A person requested a checkpoint."""


@dataclasses.dataclass(frozen=True)
class RestoreRequested(Event):
    """A person requested a restart of the learner from its latest checkpoint."""


@dataclasses.dataclass(frozen=True)
class WorkersEnded(Event):
    """The operator has ended all workers. This is the last event of a job."""

    why: str = ""  # if some workers could not be ended: the reason


@dataclasses.dataclass(frozen=True)
class Ticked(Event):
    """Time has passed."""


# --- effects


class Effect:
    """Something that the coordinator must do: an output of the core."""


@dataclasses.dataclass(frozen=True)
class Send(_WorkerKeyed, Effect):
    """Call a worker. `Replied` or `Unanswered` follows."""

    method: str
    header: Header | None
    args: tuple[Any, ...] = ()
    delay: float = 0.0  # seconds before the call


@dataclasses.dataclass(frozen=True)
class Connect(_WorkerKeyed, Effect):
    """Connect to a worker."""

    address: Any


@dataclasses.dataclass(frozen=True)
class Disconnect(_WorkerKeyed, Effect):
    """Drop the connection to a worker. Later replies change nothing."""


@dataclasses.dataclass(frozen=True)
class ScaleRole(Effect):
    """Tell the operator how many workers a role must have in total."""

    role: Role
    count: int


@dataclasses.dataclass(frozen=True)
class Replace(_WorkerKeyed, Effect):
    """Request that the operator replaces a lost worker."""


@dataclasses.dataclass(frozen=True)
class Release(_WorkerKeyed, Effect):
    """Request that the operator ends a worker without a replacement."""


@dataclasses.dataclass(frozen=True)
class EndWorkers(Effect):
    """Request that the operator ends all workers. `WorkersEnded` follows."""


@dataclasses.dataclass(frozen=True)
class DrawBatches(Effect):
    """Draw the keys of batches for a learner. `BatchesDrawn` follows."""

    header: Header
    count: int


@dataclasses.dataclass(frozen=True)
class FinishBatches(Effect):
    """Release drawn batches in the replay buffer, and set the priorities of the batches on which the learner trained.

    Attributes:
        batches: Batches to release: the learner has finished them, or they were lost together with the learner.
        updates: Keys and new priorities of the batches on which the learner trained.
        params_version: Version after these updates; -1 if `updates` is empty.
    """

    batches: tuple[BatchMeta, ...]
    updates: tuple[Update, ...]
    params_version: int = -1


@dataclasses.dataclass(frozen=True)
class SaveReplay(Effect):
    """Save the replay buffer now, if this process samples from it."""


@dataclasses.dataclass(frozen=True)
class Pin(Effect):
    """Pin the newest version of a policy for an evaluation. `Pinned` follows."""

    task_id: str
    policy_id: str


@dataclasses.dataclass(frozen=True)
class Unpin(Effect):
    """Unpin the version of an evaluation."""

    policy_id: str
    params_version: int


@dataclasses.dataclass(frozen=True)
class Note(Effect):
    """A line in the log for people."""

    kind: str
    text: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Row(Effect):
    """A row of the run's metrics."""

    env_steps: int
    values: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Over(Effect):
    """The job is over."""

    failed: bool
    reason: str
