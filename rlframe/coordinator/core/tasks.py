"""The tasks of a job, and who does them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rlframe.coordinator.messages import BatchMeta, Header, Kind, StartTask
from rlframe.coordinator.states import TaskState, check, is_over


@dataclasses.dataclass
class Task:
    """Something that one worker at a time works at; each new worker's is another attempt."""

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
    save_by: float | None = None  # of an evaluation that waits until the learner has saved: for how long
    again_at: float = 0.0  # when a learner that found no data is asked again

    @property
    def kind(self) -> Kind:
        """learn, collect or evaluate."""
        return self.start.kind

    @property
    def is_over(self) -> bool:
        """Whether its state is a last one."""
        return is_over(self.state)

    @property
    def is_live(self) -> bool:
        """Whether a worker is at it."""
        return self.state in (TaskState.ASSIGNED, TaskState.RUNNING, TaskState.CLOSING)

    def become(self, state: TaskState) -> None:
        """Changes its state. Raises TransitionError where that cannot be."""
        if state is not self.state:
            check(self.state, state)
            self.state = state

    def to_json(self) -> dict[str, Any]:
        """For the journal."""
        start = {name: getattr(self.start, name) for name in ("kind", "policy_id", "options", "overrides")}
        names = ("task_id", "index", "attempt", "worker_id", "incarnation", "failures", "granted", "has_result")
        return {**{name: getattr(self, name) for name in names}, "state": self.state.value, "start": start}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Task:
        """As it was; whoever was at it has yet to say that it still is."""
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
        """The task, if there is one."""
        return self._tasks.get(task_id) if task_id is not None else None

    def add(self, start: StartTask, index: int = 0) -> Task:
        """A new task. No other ever had its id."""
        self.count += 1
        task = Task(f"{start.kind}/{self.count}", start, index)
        self.put(task)
        return task

    def put(self, task: Task) -> None:
        """Takes one in. Of those that are over only the newest are kept."""
        self._tasks[task.task_id] = task
        self._open.setdefault(task.kind, []).append(task)
        over = [each.task_id for each in self if each.is_over and each.kind != "learn"]
        for task_id in over[:-50]:
            del self._tasks[task_id]

    def open(self, kind: Kind) -> list[Task]:
        """Those that are not over."""
        found = self._open[kind] = [task for task in self._open.get(kind, ()) if not task.is_over]
        return list(found)
