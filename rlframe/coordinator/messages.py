"""Messages between a coordinator and its workers: typed, picklable, and small.

Messages never contain steps or parameters, which go through the replay buffer and the param store. Each request, except
`ping` and `resources`, carries a `Header`. It identifies repeated, late and misdirected calls.
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
WaitsFor = Literal["data", "params"]  # "data": batches for a learner, or free space for a collector
TaskPhase = Literal["idle", "starting", "running", "closing"]  # "idle" means that the worker has no task

ROLES: tuple[Role, ...] = ("learner", "collector", "evaluator")
KINDS: dict[Role, Kind] = {"learner": "learn", "collector": "collect", "evaluator": "evaluate"}
OVERRIDES: dict[Kind, tuple[str, ...]] = {
    "learn": ("policy", "learner"),
    "collect": ("env", "collector"),
    "evaluate": (),
}


WorkerKey = tuple[str, int]  # (worker_id, incarnation), which identifies one process of one worker


@dataclasses.dataclass(frozen=True)
class WorkerInfo:
    """One incarnation of a worker, in the operator's list."""

    role: Role
    index: int
    incarnation: int  # number of the incarnation, counted from 0 for each index; it never decreases
    address: str | None = None  # for the operator's transport; None until the worker accepts calls
    host: str = ""
    pid: int | None = None  # process id on that host; None if unknown
    is_live: bool = True  # True if the worker starts or runs, and was not released
    problem: str = ""  # reason that the worker does not start or has ended, if known

    @functools.cached_property
    def worker_id(self) -> str:
        """Name of the worker, such as "collector/1"."""
        return worker_id_of(self.role, self.index)

    @functools.cached_property
    def key(self) -> WorkerKey:
        """Unique key: (worker_id, incarnation)."""
        return self.worker_id, self.incarnation


def worker_id_of(role: str, index: int) -> str:
    """Return the name of a worker, such as "collector/1"."""
    return f"{role}/{index}"


@dataclasses.dataclass(frozen=True)
class Header:
    """Identifies a call by its task, attempt, worker and number. A worker refuses calls for older attempts."""

    task_id: str
    attempt: int  # number of the attempt at the task, counted from 0
    worker_id: str  # role and index, such as "collector/1"
    incarnation: int  # incarnation of the worker, counted from 0
    seq: int  # number of the call; each new call to a worker has a greater number, a repeated call has the same number


# --- requests


@dataclasses.dataclass(frozen=True)
class StartTask:
    """A request to start a task.

    Attributes:
        kind: The kind of the task: learn, collect or evaluate.
        policy_id: The policy's id in the param store.
        options: Set by the coordinator, not by a commander. An evaluation has `params_version`, the version to
            evaluate. A learner has `min_version` (it publishes only higher versions) and `epoch` (the start time of the
            task, the first part of the param store's `Attempt`).
        overrides: Values that replace parts of the worker's configuration during this task, as
            `{section: {name: JSON value}}`. A learner has the sections `policy` (hyperparameters, which are fields of
            the agent's config) and `learner` (fields of the `LearnerConfig`). A collector has the sections `env`
            (options of the environment) and `collector` (numeric parameters of its actor, such as DQN's `epsilon`).
            See `rlframe.coordinator.workers.overrides`.

    Raises:
        UsageError: A task of this kind has no such section, or a value cannot be written as JSON.
    """

    kind: Kind
    policy_id: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    overrides: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        takes = OVERRIDES[self.kind]
        for name, values in self.overrides.items():
            if name not in takes:
                allowed = f"overrides for {' and '.join(takes)}" if takes else "no overrides at all"
                raise UsageError(
                    f"A task to {self.kind} accepts no overrides for {name!r}. It accepts {allowed}. "
                    f"Got {values!r}.{suggest(name, takes)}"
                )
            if not isinstance(values, dict):
                raise UsageError(f"The overrides {name!r} of a task must be a dict of values by name, got {values!r}.")
        try:  # convert the values as the journal does, so that a restarted coordinator finds the same task
            plain = json.loads(json.dumps(self.overrides, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"The overrides of a task must be finite numbers, strings or other JSON values, got "
                f"{self.overrides!r}: {error}."
            ) from None
        object.__setattr__(self, "overrides", plain)


@dataclasses.dataclass(frozen=True)
class BatchMeta:
    """The keys of a batch, without its data. The learner fetches the items from the replay buffer."""

    keys: np.ndarray  # [B, 3] int64
    probabilities: np.ndarray  # [B]


@dataclasses.dataclass(frozen=True)
class Learn:
    """A request to learn. It contains batches, or it lets the learner draw a number of batches (called a grant)."""

    count: int  # maximum number of updates; 0 means to save only
    batches: tuple[BatchMeta, ...] | None = None  # `count` batches to learn from; None if the request is a grant
    seconds: float = 0.25  # only for a grant: after this time, the learner starts no further update
    save: bool = False  # also write a checkpoint


@dataclasses.dataclass(frozen=True)
class GetData:
    """A request to an evaluator to evaluate, or to a collector to step its environments and report its counters."""

    steps: int = 0  # stop after this many environment steps; 0 means no limit of steps
    seconds: float = 0.25  # maximum time to collect; an evaluation ignores `steps` and `seconds`


# --- replies


@dataclasses.dataclass(frozen=True)
class WorkerReply:
    """Base class of all replies from a worker."""


@dataclasses.dataclass(frozen=True)
class NotReady(WorkerReply):
    """The call is still in progress. The coordinator repeats it with the same number."""

    waits_for: WaitsFor | None = None  # what the worker waits for; None if it is busy


@dataclasses.dataclass(frozen=True)
class CallRefused(WorkerReply):
    """The worker refused the call and changed nothing, because the attempt, incarnation or call number is wrong."""

    why: str = ""
    is_misdirected: bool = False  # True if the call is for another worker or incarnation


@dataclasses.dataclass(frozen=True)
class Failed(WorkerReply):
    """The call raised an exception."""

    error: str  # type of the exception
    message: str
    traceback: str = ""
    is_permanent: bool = False  # True if a retry would fail in the same way


@dataclasses.dataclass(frozen=True)
class Alive(WorkerReply):
    """The reply to `ping`: which worker replies, and the task that it has."""

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
    """The task has started."""

    info: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Demand(WorkerReply):
    """The number of batches that a learner can accept now."""

    batches: int


@dataclasses.dataclass(frozen=True)
class Update:
    """One update: the keys of its batch, and their new priorities if the agent computes them."""

    keys: np.ndarray  # [B, 3] int64
    priorities: np.ndarray | None = None  # [B]


@dataclasses.dataclass(frozen=True)
class Learned(WorkerReply):
    """The reply to `learn`."""

    params_version: int  # newest version in the param store
    learner_steps: int  # updates since the start of the run
    updates: tuple[Update, ...]
    dropped: int = 0  # number of granted batches that were too old, or no longer in the buffer
    logs: dict[str, float] = dataclasses.field(default_factory=dict)  # logs of the last update


@dataclasses.dataclass(frozen=True)
class Collected(WorkerReply):
    """The counters of a collector, and the number of steps of this call."""

    stats: dict[str, Any]  # result of `Actor.stats()`: counters since the start of the task, rank, incarnation
    params_version: int  # version of the parameters that chose the last actions
    waits: bool = False  # True if the collector waits for newer parameters, or for free space in the buffer
    length: int = 0  # number of environment steps in this call


@dataclasses.dataclass(frozen=True)
class Evaluated(WorkerReply):
    """The result of an evaluation of one version."""

    params_version: int
    values: dict[str, float]  # with the keys return_mean, return_std, length_mean and episodes


@dataclasses.dataclass(frozen=True)
class Closed(WorkerReply):
    """The task has ended."""

    # The result of a learner has the keys learner_steps, params_version and checkpoint. The result of a collector has
    # its last stats and env_steps_per_second.
    result: dict[str, Any] = dataclasses.field(default_factory=dict)
