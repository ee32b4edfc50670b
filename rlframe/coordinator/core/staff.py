"""Who works for a job: workers are seen, pinged, suspected, lost, adopted and let go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.roster import Worker
from rlframe.coordinator.core.tasks import Task
from rlframe.coordinator.messages import Alive, Reply, Resources, Role
from rlframe.coordinator.states import TaskState, WorkerState, is_over

if TYPE_CHECKING:
    from rlframe.coordinator.core.machine import Machine

_NEEDED: tuple[Role, ...] = ("learner", "collector")  # without any of which a job makes no progress
_CAN_BE_SUSPECT = (WorkerState.IDLE, WorkerState.BUSY, WorkerState.CLOSING)


class Staff:
    """Keeps the roster of a machine.

    Args:
        machine: whose workers they are.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._false_starts: dict[str, int] = {}  # in a row, by worker_id
        self._lacks_since: dict[Role, float] = {}  # when a role was seen last, or the operator could not say
        self._before: dict[str, int] = {}  # worker_id -> incarnation, of the coordinator before this one

    def to_json(self) -> dict[str, int]:
        """The incarnations of those that are here to stay, or were when the coordinator was away."""
        here = {worker.worker_id: worker.incarnation for worker in self._machine.roster if worker.is_here}
        return {**self._before, **here}

    def restore(self, saved: dict[str, int]) -> None:
        """Takes what `to_json` gave: of these, some may have ended meanwhile."""
        self._before = saved

    # --- coming

    def listed(self, workers: tuple[ev.Seen, ...]) -> None:
        """Takes what the operator has: there are new ones, and those that it has not are lost."""
        self._count_those_that_ended_unseen(workers)
        for seen in workers:
            self._see(seen)
        here = {(seen.worker_id, seen.incarnation) for seen in workers}
        for worker in self._machine.roster:
            if not is_over(worker.state) and (worker.worker_id, worker.incarnation) not in here:
                self.lose(worker, "its process has ended")

    def _count_those_that_ended_unseen(self, workers: tuple[ev.Seen, ...]) -> None:
        machine = self._machine
        newest = {seen.worker_id: seen.incarnation for seen in workers}
        for worker_id, incarnation in self._before.items():
            if newest.get(worker_id, -1) != incarnation:
                machine.accounts.restarts += 1
                text = f"{worker_id} (incarnation {incarnation}) ended while the coordinator was away."
                machine.note("lost", text, worker_id=worker_id, incarnation=incarnation)
        self._before = {}

    def _see(self, seen: ev.Seen) -> None:
        machine = self._machine
        newest = machine.roster.newest(seen.worker_id)
        if newest is not None and newest.incarnation >= seen.incarnation:
            worker = newest
            if newest.incarnation > seen.incarnation or (is_over(newest.state) and not seen.stays):
                return  # it has not gone yet
            if is_over(newest.state):
                if newest.state is WorkerState.LOST or self._is_enough(seen.role):
                    return
                worker = machine.roster.add(seen, machine.now)  # it was let go, and waits for being wanted again
        elif seen.stays and self._is_enough(seen.role):
            return
        else:
            if newest is not None and not is_over(newest.state):
                self.lose(newest, "its process was replaced")
            worker = machine.roster.add(seen, machine.now)
            if self._here(worker.role) > machine.wanted[worker.role] and machine.ending is None:
                self.remove(worker)
                return
        if worker.state is WorkerState.REQUESTED and seen.address is not None:
            worker.address, worker.heard_at = seen.address, machine.now
            worker.become(WorkerState.CONNECTING)
            machine.emit(ev.Open(worker.worker_id, worker.incarnation, seen.address))
            self._ping(worker)

    def _here(self, role: Role) -> int:
        return len([worker for worker in self._machine.roster.of(role) if worker.is_here])

    def _is_enough(self, role: Role) -> bool:
        return self._here(role) >= self._machine.wanted[role]

    def answered_ping(self, worker: Worker, reply: Reply) -> None:
        """Takes the answer to a call that is of no task: `ping` or `resources`."""
        self.hear(worker)
        if isinstance(reply, Alive):
            worker.ping_out, worker.overdue = False, reply.overdue
            if reply.progress != worker.progress:
                worker.moved_at = self._machine.now
            # Work that was declared has a deadline of its own, which the worker itself looks at.
            if reply.progress != worker.progress or (reply.within and not reply.overdue):
                worker.progress, worker.progress_at = reply.progress, self._machine.now
            if worker.state is WorkerState.CONNECTING:
                self._came(worker, reply)
            if worker.call is None:
                self._machine.work.drive(worker)
        elif isinstance(reply, Resources):
            worker.host, worker.pid = reply.host, reply.pid

    def _came(self, worker: Worker, reply: Alive) -> None:
        machine = self._machine
        worker.become(WorkerState.IDLE)
        self._false_starts.pop(worker.worker_id, None)
        machine.emit(ev.Send(worker.worker_id, worker.incarnation, "resources", None))
        text = f"{worker.worker_id} (incarnation {worker.incarnation}) is here."
        machine.note("came", text, worker_id=worker.worker_id)
        task = machine.tasks.get(reply.task_id)
        if task is not None and _goes_on(worker, task, reply):
            self._adopt(worker, task)

    def _adopt(self, worker: Worker, task: Task) -> None:
        """This coordinator was restarted: the worker has gone on meanwhile."""
        machine = self._machine
        task.become(TaskState.ASSIGNED)
        task.become(TaskState.RUNNING)
        task.started_at = machine.now
        worker.become(WorkerState.BUSY)
        worker.task_id = task.task_id
        machine.learner_came = True
        if task.kind == "learn":
            machine.learning.waits(None)
        machine.note("adopted", f"{worker.worker_id} is at {task.task_id} still.", worker_id=worker.worker_id)

    def wait_from_now(self) -> None:
        """The job begins: workers are to come within `Limits.starting_deadline`."""
        self._lacks_since = dict.fromkeys(_NEEDED, self._machine.now)

    def why_nobody_comes(self) -> str:
        """Why the job is given up, because no worker ever comes; empty where it is not.

        An outage of the operator is waited for, unless no learner has come before it.
        """
        machine, deadline = self._machine, self._machine.limits.starting_deadline
        is_out = bool(machine.operator_problem) or not machine.operator_answered
        for role, since in self._lacks_since.items():
            if machine.roster.of(role) or (is_out and machine.learner_came):
                self._lacks_since[role] = machine.now
            elif machine.now - since > deadline and is_out:
                why = machine.operator_problem or "it does not answer"
                return f"the operator could not be reached for {deadline:g} s: {why}"
            elif machine.now - since > deadline:
                return f"the operator answers, but has listed no {role} for {deadline:g} s: see that it can start one"
        return ""

    # --- living

    def look(self) -> None:
        """Has a look at each: is it lost, is a ping due, is there something for it to do?"""
        machine = self._machine
        for worker in machine.roster:
            if is_over(worker.state):
                continue
            task = machine.tasks.get(worker.task_id)
            why = machine.roster.why_lost(worker, task is not None and task.state is TaskState.ASSIGNED, machine.now)
            if why:
                self.lose(worker, why)
                continue
            self._ping_where_due(worker)
            if worker.call is None:
                machine.work.drive(worker)
            elif task is not None and task.state is TaskState.RUNNING:
                is_healthy = worker.moved_at - task.started_at > machine.limits.healthy_after
                task.failures = 0 if is_healthy else task.failures

    def _ping_where_due(self, worker: Worker) -> None:
        machine, limits = self._machine, self._machine.limits
        # One that is out for long is lost: the connection may have been another's.
        every = limits.suspect_after if worker.ping_out else limits.ping_every
        if worker.state is not WorkerState.REQUESTED and worker.pinged_at + every <= machine.now:
            self._ping(worker)
        silent = machine.now - worker.heard_at
        task = machine.tasks.get(worker.task_id)
        starts = task is not None and task.state is TaskState.ASSIGNED
        if silent > limits.suspect_after and worker.state in _CAN_BE_SUSPECT and not starts:
            worker.become(WorkerState.SUSPECT)
            text = f"{worker.worker_id} has not answered for {silent:.0f} s."
            machine.note("suspect", text, worker_id=worker.worker_id)

    def _ping(self, worker: Worker) -> None:
        worker.pinged_at, worker.ping_out = self._machine.now, True
        self._machine.emit(ev.Send(worker.worker_id, worker.incarnation, "ping", None))

    def hear(self, worker: Worker) -> None:
        """Takes an answer as a sign of life."""
        if self._machine.roster.hear(worker, self._machine.now):
            self._machine.note("back", f"{worker.worker_id} answers again.", worker_id=worker.worker_id)

    # --- going

    def remove(self, worker: Worker) -> None:
        """Has a worker go, once what it does is closed."""
        worker.leaves = True
        worker.become(WorkerState.DRAINING)
        if self._machine.tasks.get(worker.task_id) is None:
            self._release(worker)
        else:
            self._machine.work.drive(worker)

    def free(self, worker: Worker) -> None:
        """It has nothing to do any more: it is idle, or goes."""
        worker.task_id = None
        if worker.leaves:
            self._release(worker)
        else:
            worker.become(WorkerState.IDLE)

    def _release(self, worker: Worker) -> None:
        worker.become(WorkerState.GONE)
        self._machine.emit(ev.Release(worker.worker_id, worker.incarnation))
        self._machine.emit(ev.Shut(worker.worker_id, worker.incarnation))
        self._machine.note("gone", f"{worker.worker_id} has left.", worker_id=worker.worker_id)

    def lose(self, worker: Worker, why: str) -> None:
        """Gives a worker up: another is to take its index, and its task is tried again."""
        machine = self._machine
        came = worker.state not in (WorkerState.REQUESTED, WorkerState.CONNECTING)
        worker.become(WorkerState.LOST)
        machine.emit(ev.Shut(worker.worker_id, worker.incarnation))
        is_replaced = not worker.leaves and (machine.ending is None or machine.ending.replaces(worker.role))
        if not is_replaced:
            machine.emit(ev.Release(worker.worker_id, worker.incarnation))
        else:
            machine.accounts.restarts += 1
            machine.emit(ev.ReportFailed(worker.worker_id, worker.incarnation))
        machine.note(
            "lost",
            f"{worker.worker_id} (incarnation {worker.incarnation}) is lost: {why}.",
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
        )
        task, worker.task_id, worker.call = machine.tasks.get(worker.task_id), None, None
        if task is not None and not task.is_over:
            machine.accounts.discarded += worker.num_envs
            # A collector that ran may be lost as often as its machine likes: others go on.
            counts = task.state is TaskState.ASSIGNED or task.kind != "collect"
            machine.outcomes.retry(task, why, counts=counts)
        if not came and is_replaced:
            starts = self._false_starts[worker.worker_id] = self._false_starts.get(worker.worker_id, 0) + 1
            if starts > machine.limits.max_failures:
                times = f"{worker.worker_id} did not come up {starts} times in a row"
                machine.end(True, f"{times}: {why}. Look at its output")


def _goes_on(worker: Worker, task: Task, reply: Alive) -> bool:
    """Whether it says that it is at an attempt that was its own before the coordinator was restarted."""
    is_its_own = (task.worker_id, task.incarnation) == (worker.worker_id, worker.incarnation)
    is_known = (task.state, task.attempt) == (TaskState.PENDING, reply.attempt)
    return is_its_own and is_known and reply.phase in ("running", "waiting")
