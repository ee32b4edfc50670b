"""Which workers there are, and whether each of them is alive."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from rlframe.coordinator.core.events import Seen
from rlframe.coordinator.core.limits import Limits
from rlframe.coordinator.messages import Header, Role
from rlframe.coordinator.states import WorkerState, check, is_over


@dataclasses.dataclass(frozen=True)
class Call:
    """What a worker was asked last, and has not answered for good."""

    method: str
    header: Header
    args: tuple[Any, ...] = ()


@dataclasses.dataclass
class Worker:
    """One incarnation of a worker, as the coordinator knows it."""

    worker_id: str
    role: Role
    index: int
    incarnation: int
    since: float  # when it was first seen
    state: WorkerState = WorkerState.REQUESTED
    address: Any = None
    host: str = ""
    pid: int | None = None
    heard_at: float = 0.0
    pinged_at: float = 0.0
    ping_out: bool = False
    progress: int = -1  # as it said last
    progress_at: float = 0.0  # when that changed, or the worker said what it waits for or what it may take longer for
    moved_at: float = 0.0  # when that changed
    overdue: str = ""  # how its work exceeds the deadline that it has declared, as it said last
    task_id: str | None = None
    call: Call | None = None
    said_at: float = 0.0  # when the call was, or is to be, sent
    leaves: bool = False  # it is to go once its task is closed
    counts: dict[str, float] = dataclasses.field(default_factory=dict)  # as it said last
    num_envs: int = 0  # a collector's
    params_version: int = -1
    waits: bool = False  # a collector: for newer parameters, or for room

    def become(self, state: WorkerState) -> None:
        """Changes its state. Raises TransitionError where that cannot be."""
        if state is not self.state:
            check(self.state, state)
            self.state = state

    @property
    def is_here(self) -> bool:
        """Whether it counts as one of those that are wanted."""
        return not is_over(self.state) and not self.leaves

    @property
    def answers(self) -> bool:
        """Whether it can be given something to do."""
        return self.state in (WorkerState.IDLE, WorkerState.BUSY, WorkerState.CLOSING, WorkerState.DRAINING)


class Roster:
    """The newest incarnation of each worker."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._workers: dict[str, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def get(self, worker_id: str | None, incarnation: int | None = None) -> Worker | None:
        """The worker, where it is that incarnation (any, for None) and its state is not a last one."""
        worker = self._workers.get(worker_id) if worker_id is not None else None
        if worker is None or is_over(worker.state):
            return None
        return worker if incarnation in (None, worker.incarnation) else None

    def newest(self, worker_id: str) -> Worker | None:
        """The newest incarnation that was ever seen, also where it is lost or gone."""
        return self._workers.get(worker_id)

    def of(self, role: Role) -> list[Worker]:
        """Those that are not lost or gone, by index."""
        return sorted((w for w in self if w.role == role and not is_over(w.state)), key=lambda w: w.index)

    def add(self, seen: Seen, now: float) -> Worker:
        """Takes a new incarnation in the place of the one before."""
        worker = Worker(seen.worker_id, seen.role, seen.index, seen.incarnation, since=now)
        worker.heard_at = worker.progress_at = now
        worker.host, worker.pid = seen.host, seen.pid
        self._workers[seen.worker_id] = worker
        return worker

    def hear(self, worker: Worker, now: float) -> bool:
        """Notes that it answered; whether that ended a suspicion."""
        worker.heard_at = now
        if worker.state is not WorkerState.SUSPECT:
            return False
        if worker.leaves:
            worker.become(WorkerState.DRAINING)
        else:
            worker.become(WorkerState.BUSY if worker.task_id else WorkerState.IDLE)
        worker.progress_at = now
        return True

    def why_lost(self, worker: Worker, starts: bool, now: float) -> str:
        """Why it is to be given up; empty where it is not.

        Args:
            worker: one that is not lost.
            starts: whether its task is starting, which may take a compilation.
            now: the time, in seconds.
        """
        limits, silent = self._limits, now - worker.heard_at
        if worker.state in (WorkerState.REQUESTED, WorkerState.CONNECTING):
            waited = now - worker.since
            is_late = waited > limits.starting_deadline
            if worker.state is WorkerState.CONNECTING:  # it has an address, and does not answer there
                is_late = is_late or silent > limits.lost_after_starting
            return f"it did not come within {waited:.0f} s" if is_late else ""
        if silent > (limits.lost_after_starting if starts else limits.lost_after):
            return f"it has not answered for {silent:.0f} s"
        if math.isinf(limits.lost_after):
            return ""  # nobody is lost for being slow
        if worker.overdue:
            return f"it hangs: {worker.overdue}"
        stuck = now - worker.progress_at
        deadline = limits.starting_deadline if starts else limits.progress_deadline
        if worker.call is not None and stuck > deadline:
            return f"it answers, but {worker.call.method} has made no progress for {stuck:.0f} s"
        return ""
