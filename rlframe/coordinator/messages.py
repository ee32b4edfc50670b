"""Messages between a coordinator and its workers: typed, picklable, and small.

Steps and parameters never travel in them: those go through the replay buffer and the param store. Every request but
`ping` and `resources` carries a `Header`, by which a repeated, late or misdirected one is told.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any, Literal

import numpy as np

from rlframe.errors import UsageError, suggest

Role = Literal["learner", "collector", "evaluator"]
Kind = Literal["learn", "collect", "evaluate"]
WaitsFor = Literal["data", "params"]  # "data": batches to learn from, or room for steps
TaskPhase = Literal["idle", "starting", "running", "closing"]  # of a worker's task; "idle": it has none

ROLES: tuple[Role, ...] = ("learner", "collector", "evaluator")
KINDS: dict[Role, Kind] = {"learner": "learn", "collector": "collect", "evaluator": "evaluate"}  # what each works at
OVERRIDES: dict[Kind, tuple[str, ...]] = {
    "learn": ("policy", "learner"),
    "collect": ("env", "collector"),
    "evaluate": (),
}


WorkerKey = tuple[str, int]  # (worker_id, incarnation): exactly one life of one worker


@dataclasses.dataclass(frozen=True)
class WorkerInfo:
    """One incarnation of a worker, as its operator lists it."""

    role: Role
    index: int
    incarnation: int  # of that index, from 0; never goes back
    address: str | None = None  # where the operator's transport calls it; None until it serves
    host: str = ""
    pid: int | None = None  # on that host; None where it is not known
    is_live: bool = True  # it runs or starts, and was not told to end
    problem: str = ""  # why it does not start, or how it ended, if that is known

    @functools.cached_property
    def worker_id(self) -> str:
        """`collector/1`."""
        return worker_id_of(self.role, self.index)

    @functools.cached_property
    def key(self) -> WorkerKey:
        """Unique key."""
        return self.worker_id, self.incarnation


def worker_id_of(role: str, index: int) -> str:
    """`collector/1`."""
    return f"{role}/{index}"


@dataclasses.dataclass(frozen=True)
class Header:
    """Name the task, attempt, worker and number of a call. A worker refuses attempts older than the newest it knows."""

    task_id: str
    attempt: int  # of the task, from 0
    worker_id: str  # "collector/1": the role and the index
    incarnation: int  # of that index, from 0
    seq: int  # rises with every new call to a worker, across restarts of the coordinator; the same one: a repetition


# --- requests


@dataclasses.dataclass(frozen=True)
class StartTask:
    """Start a task.

    Attributes:
        kind: learn, collect or evaluate.
        policy_id: whose parameters, in the param store.
        options: of an evaluation `params_version`, the one version that it is of; of a learner `min_version`, which
            it publishes above, and `epoch`, when the task began, which comes before the attempt's number in the param
            store's `Attempt`. The coordinator's own: a commander leaves them out.
        overrides: what this task does otherwise than its worker was made to, plain numbers and words by name. Of a
            learner `policy` (fields of the agent's config: the policy's hyper-parameters) and `learner` (of the
            `LearnerConfig`); of a collector `env` (options of the environment) and `collector` (numbers that its
            actor acts by, as DQN's `epsilon`). See `rlframe.coordinator.workers.overrides`.

    Raises:
        UsageError: a task of this kind has no such overrides, or they are not plain.
    """

    kind: Kind
    policy_id: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    overrides: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        takes = OVERRIDES[self.kind]
        for name, values in self.overrides.items():
            if name not in takes:
                there = f"only {' and '.join(takes)}" if takes else "none"
                raise UsageError(
                    f"A task to {self.kind} has no overrides {name!r}, {there}: got {values!r}.{suggest(name, takes)}"
                )
            if not isinstance(values, dict):
                raise UsageError(f"The overrides {name!r} of a task are values by name, got {values!r}.")
        try:  # as a journal gives them back, so that a coordinator which was restarted finds the same task
            plain = json.loads(json.dumps(self.overrides, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"The overrides of a task are plain numbers and words by name, got {self.overrides!r}: {error}."
            ) from None
        object.__setattr__(self, "overrides", plain)


@dataclasses.dataclass(frozen=True)
class BatchMeta:
    """Which items a learner fetches from the replay buffer: a batch without its data."""

    keys: np.ndarray  # [B, 3] int64
    probabilities: np.ndarray  # [B]


@dataclasses.dataclass(frozen=True)
class Learn:
    """Batches to learn from: by their keys, or so many as the learner draws itself."""

    count: int  # updates at most; 0: it only saves
    batches: tuple[BatchMeta, ...] | None = None  # `count` of them; None: a grant, the learner draws and reports
    seconds: float = 0.25  # after which no further update is begun
    save: bool = False  # write a checkpoint as well


@dataclasses.dataclass(frozen=True)
class GetData:
    """Step the environments for this long, then report."""

    steps: int = 0  # environment steps to take at least, where the time lasts; 0: until it is up
    seconds: float = 0.25


# --- replies


@dataclasses.dataclass(frozen=True)
class WorkerReply:
    """An answer of a worker."""


@dataclasses.dataclass(frozen=True)
class NotReady(WorkerReply):
    """The call is under way, or waits for something: repeat it, with the same number."""

    waits_for: WaitsFor | None = None  # however long that takes; None: it works


@dataclasses.dataclass(frozen=True)
class CallRefused(WorkerReply):
    """The call is of another attempt, incarnation or number than this worker is at: it changed nothing."""

    why: str = ""
    is_misdirected: bool = False  # this is not the worker, or not the incarnation, that the call is for


@dataclasses.dataclass(frozen=True)
class Failed(WorkerReply):
    """The call raised."""

    error: str  # the exception's type
    message: str
    traceback: str = ""
    is_permanent: bool = False  # another try would end in the same way


@dataclasses.dataclass(frozen=True)
class Alive(WorkerReply):
    """The answer to `ping`."""

    worker_id: str
    incarnation: int
    phase: TaskPhase
    task_id: str | None = None
    attempt: int = -1


@dataclasses.dataclass(frozen=True)
class Resources(WorkerReply):
    """The host and process of a worker."""

    host: str
    pid: int


@dataclasses.dataclass(frozen=True)
class Started(WorkerReply):
    """A task has begun."""

    info: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Demand(WorkerReply):
    """Batches that a learner can take now."""

    batches: int


@dataclasses.dataclass(frozen=True)
class Update:
    """One batch that was learned from: which items, and their new priorities where the agent gives some."""

    keys: np.ndarray  # [B, 3] int64
    priorities: np.ndarray | None = None  # [B]


@dataclasses.dataclass(frozen=True)
class Learned(WorkerReply):
    """The result of a `Learn`."""

    params_version: int  # that is in the param store
    learner_steps: int  # since the run began
    updates: tuple[Update, ...]  # one for each batch that was learned from
    dropped: int = 0  # batches that were granted and not learned from: too old, or gone
    logs: dict[str, float] = dataclasses.field(default_factory=dict)  # of the last update


@dataclasses.dataclass(frozen=True)
class Collected(WorkerReply):
    """The counters of a collector, and how much this call has added to the buffer."""

    stats: dict[str, Any]  # as `Actor.stats`: counters since it was made, its rank and incarnation
    params_version: int  # that acted last
    waits: bool = False  # for newer parameters, or for room in the buffer
    length: int = 0  # of the rollout: environment steps that this call took


@dataclasses.dataclass(frozen=True)
class Evaluated(WorkerReply):
    """An evaluation, of exactly one version."""

    params_version: int
    values: dict[str, float]  # return_mean, return_std, length_mean, episodes


@dataclasses.dataclass(frozen=True)
class Closed(WorkerReply):
    """A task has ended."""

    # Of a learner learner_steps, params_version, checkpoint; of a collector its last stats, and env_steps_per_second.
    result: dict[str, Any] = dataclasses.field(default_factory=dict)
