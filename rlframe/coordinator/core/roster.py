"""The workers of a job, and what is known of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.accounts import Rates
from rlframe.coordinator.messages import Role, WorkerInfo
from rlframe.coordinator.states import WorkerState, check, is_over


@dataclasses.dataclass
class KnownWorker:
    """One incarnation of a worker, as the coordinator knows it."""

    worker_id: str
    role: Role
    index: int
    incarnation: int
    since: float  # when it was first seen
    failed_starts: int = 0  # incarnations before this one that never came, in a row
    state: WorkerState = WorkerState.REQUESTED
    address: Any = None
    host: str = ""
    pid: int | None = None
    heard_at: float = 0.0
    pinged_at: float = 0.0
    ping_out: bool = False
    task_id: str | None = None
    call: ev.Send | None = None  # what it was asked last, and has not answered for good
    said_at: float = 0.0  # when the call was, or is to be, sent
    leaves: bool = False  # it is to go once its task is closed
    counts: dict[str, float] = dataclasses.field(default_factory=dict)  # as it said last, since its task began
    collected: int = 0  # environment steps of a collector's rollouts
    rates: Rates = dataclasses.field(default_factory=lambda: Rates(1))  # of those
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

    def __init__(self) -> None:
        self._workers: dict[str, KnownWorker] = {}

    def __iter__(self) -> Iterator[KnownWorker]:
        return iter(list(self._workers.values()))

    def get(self, worker_id: str | None, incarnation: int | None = None) -> KnownWorker | None:
        """The worker, where it is that incarnation (any, for None) and its state is not a last one."""
        worker = self._workers.get(worker_id) if worker_id is not None else None
        if worker is None or is_over(worker.state):
            return None
        return worker if incarnation in (None, worker.incarnation) else None

    def newest(self, worker_id: str) -> KnownWorker | None:
        """The newest incarnation that was ever seen, also where it is lost or gone."""
        return self._workers.get(worker_id)

    def of(self, role: Role) -> list[KnownWorker]:
        """Those that are not lost or gone, by index."""
        return sorted((w for w in self if w.role == role and not is_over(w.state)), key=lambda w: w.index)

    def add(self, seen: WorkerInfo, now: float) -> KnownWorker:
        """Takes a new incarnation in the place of the one before."""
        before = self.newest(seen.worker_id)
        failed_starts = before.failed_starts if before is not None else 0
        worker = KnownWorker(seen.worker_id, seen.role, seen.index, seen.incarnation, now, failed_starts)
        worker.heard_at = now
        worker.host, worker.pid = seen.host, seen.pid
        self._workers[seen.worker_id] = worker
        return worker
