"""The records of a job: its workers and its tasks, each with its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.accounts import Rates
from rlframe.coordinator.messages import BatchMeta, Header, Kind, Role, StartTask, WorkerInfo, WorkerKey
from rlframe.coordinator.states import Stateful, TaskState, WorkerState, is_over


@dataclasses.dataclass
class Ping:
    """The newest ping to a worker."""

    sent_at: float = 0.0
    is_out: bool = False  # no answer has come yet


@dataclasses.dataclass
class CollectorProgress:
    """Reports of a collector."""

    num_envs: int = 0
    env_steps: int = 0  # in all answers of this incarnation
    rates: Rates = dataclasses.field(default_factory=lambda: Rates(1))  # of `env_steps`
    counts: dict[str, float] = dataclasses.field(default_factory=dict)  # its counters since its task began
    params_version: int | None = None  # that it acts by
    is_waiting: bool = False  # for newer parameters, or for room


@dataclasses.dataclass
class WorkerRecord(Stateful):
    """One incarnation of a worker: where it runs, its state, its task, and the call that is out."""

    worker_id: str
    role: Role
    index: int
    incarnation: int
    listed_at: float  # when the operator listed it first
    failed_starts: int = 0  # incarnations up to this one that never answered, in a row
    has_answered: bool = False  # a ping, of this coordinator or of an earlier one
    state: WorkerState = WorkerState.REQUESTED
    host: str = ""
    pid: int | None = None
    last_reply_at: float = 0.0  # time of its last sign of life
    ping: Ping = dataclasses.field(default_factory=Ping)
    task_id: str | None = None
    call: ev.Send | None = None  # the call that is out; None: none is
    called_at: float = 0.0  # time at which the call was, or will be, sent
    progress: CollectorProgress = dataclasses.field(default_factory=CollectorProgress)

    @property
    def key(self) -> WorkerKey:
        """(worker_id, incarnation)."""
        return self.worker_id, self.incarnation

    @property
    def is_leaving(self) -> bool:
        """True if it goes once its task is closed."""
        return self.state is WorkerState.DRAINING

    @property
    def counts_as_wanted(self) -> bool:
        """True if it is one of the `Requests.wanted` workers of its role."""
        return not is_over(self.state) and not self.is_leaving

    @property
    def can_be_called(self) -> bool:
        """True if it has answered a ping, and is not suspect or lost."""
        return self.state in (WorkerState.IDLE, WorkerState.BUSY, WorkerState.CLOSING, WorkerState.DRAINING)


class Roster:
    """The newest incarnation of each worker.

    Attributes:
        missing_since: when a role without which there is no progress was seen last, or the operator could not say.
    """

    def __init__(self) -> None:
        self.missing_since: dict[Role, float] = {}
        self._workers: dict[str, WorkerRecord] = {}

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(list(self._workers.values()))

    def get(self, worker_id: str | None, incarnation: int | None = None) -> WorkerRecord | None:
        """Return the worker if it has this incarnation (None: any), and is not lost or gone."""
        worker = self._workers.get(worker_id) if worker_id is not None else None
        if worker is None or is_over(worker.state):
            return None
        return worker if incarnation in (None, worker.incarnation) else None

    def newest(self, worker_id: str) -> WorkerRecord | None:
        """Return the newest incarnation that was ever seen, even if it is lost or gone."""
        return self._workers.get(worker_id)

    def of(self, role: Role) -> list[WorkerRecord]:
        """Return the workers that are not lost or gone, by index."""
        return sorted((w for w in self if w.role == role and not is_over(w.state)), key=lambda w: w.index)

    def add(self, seen: WorkerInfo, now: float) -> WorkerRecord:
        """Add a new incarnation, which replaces the one before."""
        before = self.newest(seen.worker_id)
        failed_starts = before.failed_starts if before is not None else 0
        worker = WorkerRecord(seen.worker_id, seen.role, seen.index, seen.incarnation, now, failed_starts)
        worker.last_reply_at = now
        worker.host, worker.pid = seen.host, seen.pid
        self._workers[seen.worker_id] = worker
        return worker


@dataclasses.dataclass
class Task(Stateful):
    """Work for one worker at a time. Each worker that starts it makes another attempt."""

    task_id: str
    start: StartTask
    index: int = 0  # of the worker that is meant, for `collect`
    state: TaskState = TaskState.PENDING
    attempt: int = -1
    worker_id: str | None = None
    incarnation: int = -1
    failures: int = 0  # in a row
    started_at: float = 0.0
    granted: int = 0  # batches that are out with the learner
    batches: tuple[BatchMeta, ...] = ()  # the same, by their keys
    drawing: Header | None = None  # batches are being drawn for the learner
    has_result: bool = False  # of an evaluation: only its worker has still to be told that it is over
    save_deadline: float | None = None  # of an evaluation that waits until the learner has saved: for how long
    retry_at: float = 0.0  # when a learner that found no data is asked again

    @property
    def kind(self) -> Kind:
        """learn, collect or evaluate."""
        return self.start.kind

    @property
    def is_over(self) -> bool:
        """True if its state is final."""
        return is_over(self.state)

    @property
    def is_live(self) -> bool:
        """True if a worker works at it."""
        return self.state in (TaskState.ASSIGNED, TaskState.RUNNING, TaskState.CLOSING)

    def to_json(self) -> dict[str, Any]:
        """Return the state for the journal."""
        start = {name: getattr(self.start, name) for name in ("kind", "policy_id", "options", "overrides")}
        names = ("task_id", "index", "attempt", "worker_id", "incarnation", "failures", "granted", "has_result")
        return {**{name: getattr(self, name) for name in names}, "state": self.state.value, "start": start}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Task:
        """Restore it as pending: its worker must confirm that it still works at it."""
        state = TaskState(saved["state"])
        state = state if is_over(state) or saved["has_result"] else TaskState.PENDING
        return cls(**{**saved, "start": StartTask(**saved["start"]), "state": state})


class Tasks:
    """The tasks of a job."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}
        self._open: dict[Kind, list[Task]] = {}  # and such as are over since it was looked at
        self.count = 0  # of the tasks that there ever were

    def __iter__(self) -> Iterator[Task]:
        return iter(list(self._tasks.values()))

    def get(self, task_id: str | None) -> Task | None:
        """Return the task; None if there is none."""
        return self._tasks.get(task_id) if task_id is not None else None

    def add(self, start: StartTask, index: int = 0) -> Task:
        """Add a new task, whose id no other task ever had."""
        self.count += 1
        task = Task(f"{start.kind}/{self.count}", start, index)
        self.put(task)
        return task

    def put(self, task: Task) -> None:
        """Add a task. Of those that are over only the newest are kept."""
        self._tasks[task.task_id] = task
        self._open.setdefault(task.kind, []).append(task)
        over = [each.task_id for each in self if each.is_over and each.kind != "learn"]
        for task_id in over[:-50]:
            del self._tasks[task_id]

    def open(self, kind: Kind) -> list[Task]:
        """Return the tasks of a kind that are not over."""
        found = self._open[kind] = [task for task in self._open.get(kind, ()) if not task.is_over]
        return list(found)
