"""The records of a job's workers and tasks, and the counters of the job with their rates."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.messages import BatchMeta, Header, Kind, Learned, Role, StartTask, WorkerInfo, WorkerKey
from rlframe.coordinator.states import Stateful, TaskState, WorkerState, is_over
from rlframe.metrics.rows import ActorCounts

_SPAN = 5.0  # length in seconds of the time window of the rates


@dataclasses.dataclass
class Accounts(ActorCounts):
    """The counters of a job's collectors and learners, as written to the journal.

    Attributes:
        learner_steps: Updates in the newest parameters. Falls when a restarted learner continues from its checkpoint.
        granted: Batches that were granted to learners, or drawn for learners.
        learned: Granted batches on which learners trained.
        dropped: Granted batches that learners dropped.
        lost: Granted batches that were lost with a learner or a coordinator.
        learns: Number of learners' replies to grants.
        evaluated_at: Environment steps at the start of the newest evaluation.
        discarded: Unfinished fragments that were lost with a collector. A collector has one per environment.
    """

    learner_steps: int = 0
    params_version: int = -1
    granted: int = 0
    learned: int = 0
    dropped: int = 0
    lost: int = 0
    learns: int = 0
    discarded: int = 0
    evaluated_at: int = 0
    stale: int = 0  # number of replies to calls that are no longer pending
    retries: int = 0  # number of retries of tasks
    restarts: int = 0  # number of replaced workers
    coordinator_restarts: int = 0
    logs: dict[str, float] = dataclasses.field(default_factory=dict)
    returns: list[list[float]] = dataclasses.field(default_factory=list)  # [env_steps, mean return] of each metrics row
    # [env_steps, mean return, version] of each evaluation
    evaluations: list[list[float]] = dataclasses.field(default_factory=list)

    def learn(self, reply: Learned) -> None:
        """Count the batches in a learner's reply to a grant."""
        self.reach(reply.learner_steps, reply.params_version)
        self.learned += len(reply.updates)
        self.dropped += reply.dropped
        self.learns += 1
        self.logs = dict(reply.logs) or self.logs

    def reach(self, learner_steps: int, params_version: int) -> None:
        """Record the number of updates and the newest version of a learner."""
        self.learner_steps = int(learner_steps)
        self.params_version = max(self.params_version, int(params_version))

    def to_json(self) -> dict[str, Any]:
        """Return the keyword arguments that recreate this object, as the journal stores them."""
        saved = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        copies = {name: value.copy() for name, value in saved.items() if isinstance(value, (dict, list))}
        return {**saved, **copies}  # shallow copies suffice, because nested values are never changed in place


class Rates:
    """Computes the rates of several counts, per second, over the last few seconds.

    Args:
        size: Number of counts.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._points: collections.deque[tuple[float, tuple[float, ...]]] = collections.deque()

    def add(self, now: float, *counts: float) -> None:
        """Record the current counts."""
        self._points.append((now, counts))
        while self._points[0][0] < now - _SPAN:
            self._points.popleft()

    def per_second(self, now: float) -> tuple[float, ...]:
        """Return the rate of each count, or 0 if there are no recent records."""
        recent = [point for point in self._points if point[0] >= now - _SPAN]
        if not recent or recent[0][0] >= now:
            return (0.0,) * self._size
        began, first = recent[0]
        return tuple((last - before) / (now - began) for before, last in zip(first, recent[-1][1]))


@dataclasses.dataclass
class CollectorProgress:
    """The progress of a collector, according to its replies."""

    num_envs: int = 0
    env_steps: int = 0  # environment steps of this incarnation
    rates: Rates = dataclasses.field(default_factory=lambda: Rates(1))  # recent increase of `env_steps` per second
    counts: dict[str, float] = dataclasses.field(default_factory=dict)  # counters since the start of the current task
    params_version: int | None = None  # version of the parameters that chose the last actions
    is_waiting: bool = False  # True while the collector waits for newer parameters, or for free space in the buffer


@dataclasses.dataclass
class WorkerRecord(Stateful):
    """One incarnation of a worker, with its host, state, task and pending call."""

    worker_id: str
    role: Role
    index: int
    incarnation: int
    listed_at: float  # time at which the operator first listed the worker
    failed_starts: int = 0  # number of consecutive incarnations that never replied
    has_answered: bool = False  # True if the worker has replied to a ping of this or an earlier coordinator
    state: WorkerState = WorkerState.REQUESTED
    host: str = ""
    pid: int | None = None
    last_reply_at: float = 0.0  # time of the worker's last sign of life
    pinged_at: float = 0.0  # time of the newest ping
    awaits_ping_reply: bool = False  # True until the worker replies to the newest ping
    task_id: str | None = None
    call: ev.Send | None = None  # the worker's pending call
    called_at: float = 0.0  # time at which the call was or will be sent
    progress: CollectorProgress = dataclasses.field(default_factory=CollectorProgress)

    @property
    def key(self) -> WorkerKey:
        """Unique key: (worker_id, incarnation)."""
        return self.worker_id, self.incarnation

    @property
    def is_leaving(self) -> bool:
        """True if the worker leaves when its task is closed."""
        return self.state is WorkerState.DRAINING

    @property
    def counts_as_wanted(self) -> bool:
        """True if the worker counts toward `Requests.wanted`."""
        return not is_over(self.state) and not self.is_leaving

    @property
    def can_be_called(self) -> bool:
        """True if the worker has replied to a ping, and is not suspect or lost."""
        return self.state in (WorkerState.IDLE, WorkerState.BUSY, WorkerState.CLOSING, WorkerState.DRAINING)


class Roster:
    """The newest incarnation of each worker.

    Attributes:
        missing_since: For each required role, the last time at which a worker was present, or at
            which the operator was unreachable.
    """

    def __init__(self) -> None:
        self.missing_since: dict[Role, float] = {}
        self._workers: dict[str, WorkerRecord] = {}

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(list(self._workers.values()))

    def get(self, worker_id: str | None, incarnation: int | None = None) -> WorkerRecord | None:
        """Return the worker, or None if it is unknown, lost, gone, or has a different incarnation.

        `incarnation=None` matches every incarnation.
        """
        worker = self._workers.get(worker_id) if worker_id is not None else None
        if worker is None or is_over(worker.state):
            return None
        return worker if incarnation in (None, worker.incarnation) else None

    def newest(self, worker_id: str) -> WorkerRecord | None:
        """Return the newest incarnation of a worker, even if it is lost or gone."""
        return self._workers.get(worker_id)

    def of(self, role: Role) -> list[WorkerRecord]:
        """Return the workers of a role that are not lost or gone, sorted by index."""
        return sorted((w for w in self if w.role == role and not is_over(w.state)), key=lambda w: w.index)

    def add(self, seen: WorkerInfo, now: float) -> WorkerRecord:
        """Add a new incarnation of a worker. It replaces the previous incarnation."""
        before = self.newest(seen.worker_id)
        failed_starts = before.failed_starts if before is not None else 0
        worker = WorkerRecord(
            worker_id=seen.worker_id,
            role=seen.role,
            index=seen.index,
            incarnation=seen.incarnation,
            listed_at=now,
            failed_starts=failed_starts,
            host=seen.host,
            pid=seen.pid,
            last_reply_at=now,
        )
        self._workers[seen.worker_id] = worker
        return worker


@dataclasses.dataclass
class Task(Stateful):
    """A piece of work for at most one worker at a time. Each time a worker starts it, a new attempt begins."""

    task_id: str
    start: StartTask
    index: int = 0  # index of the collector for which the task is reserved
    state: TaskState = TaskState.PENDING
    attempt: int = -1
    worker_id: str | None = None
    incarnation: int = -1
    failures: int = 0  # number of consecutive failures
    started_at: float = 0.0
    granted: int = 0  # number of batches in the learner's pending call
    batches: tuple[BatchMeta, ...] = ()  # keys of the granted batches, if the coordinator has drawn them
    drawing: Header | None = None  # header of the pending request to draw batches for the learner
    has_result: bool = False  # True if the evaluation has a result, but its worker must still close the task
    save_deadline: float | None = None  # deadline for the learner's save that the evaluation waits for
    retry_at: float = 0.0  # earliest time of the learner's next `data_demand` call

    @property
    def kind(self) -> Kind:
        """Kind of the task: learn, collect or evaluate."""
        return self.start.kind

    @property
    def is_over(self) -> bool:
        """True if the task's state is final."""
        return is_over(self.state)

    @property
    def is_live(self) -> bool:
        """True while the task is assigned to a worker, until the task is closed."""
        return self.state in (TaskState.ASSIGNED, TaskState.RUNNING, TaskState.CLOSING)

    def to_json(self) -> dict[str, Any]:
        """Return the state for the journal."""
        names = ("task_id", "index", "attempt", "worker_id", "incarnation", "failures", "granted", "has_result")
        return {
            **{name: getattr(self, name) for name in names},
            "state": self.state.value,
            "start": dataclasses.asdict(self.start),
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Task:
        """Restore a task. An open task becomes pending until its worker confirms that the task still runs."""
        state = TaskState(saved["state"])
        state = state if is_over(state) or saved["has_result"] else TaskState.PENDING
        return cls(**{**saved, "start": StartTask(**saved["start"]), "state": state})


class Tasks:
    """The tasks of a job."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}
        self._open: dict[Kind, list[Task]] = {}  # may contain tasks that are over; `open` removes them
        self.count = 0  # number of tasks ever added

    def __iter__(self) -> Iterator[Task]:
        return iter(list(self._tasks.values()))

    def get(self, task_id: str | None) -> Task | None:
        """Return the task, or None if it does not exist."""
        return self._tasks.get(task_id) if task_id is not None else None

    def add(self, start: StartTask, index: int = 0) -> Task:
        """Add a new task with a unique id."""
        self.count += 1
        task = Task(f"{start.kind}/{self.count}", start, index)
        self.put(task)
        return task

    def put(self, task: Task) -> None:
        """Add a task. Keep only the newest 50 tasks that are over, but keep all tasks of learners."""
        self._tasks[task.task_id] = task
        self._open.setdefault(task.kind, []).append(task)
        over = [each.task_id for each in self if each.is_over and each.kind != "learn"]
        for task_id in over[:-50]:
            del self._tasks[task_id]

    def open(self, kind: Kind) -> list[Task]:
        """Return the tasks of a kind that are not over."""
        found = self._open[kind] = [task for task in self._open.get(kind, ()) if not task.is_over]
        return list(found)
