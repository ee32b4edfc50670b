"""How tasks end: they are closed, fail and are tried again, or are given up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlframe.coordinator.core.roster import Worker
from rlframe.coordinator.core.tasks import Task
from rlframe.coordinator.messages import KINDS, Closed, Collected, Failed, Role
from rlframe.coordinator.states import TaskState

if TYPE_CHECKING:
    from rlframe.coordinator.core.machine import Machine


class Outcomes:
    """Ends the tasks of a machine.

    Args:
        machine: whose tasks they are.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def closed(self, worker: Worker, task: Task, reply: Closed) -> None:
        """Takes the last that a worker says of a task."""
        machine, accounts = self._machine, self._machine.accounts
        if task.kind == "collect" and "env_steps" in reply.result:
            accounts.collect(Collected(reply.result, -1))
        if task.kind == "learn":
            accounts.learner_steps = int(reply.result.get("learner_steps", accounts.learner_steps))
            accounts.params_version = max(accounts.params_version, int(reply.result.get("params_version", -1)))
        # An evaluation without a result was closed early.
        is_done = task.kind != "evaluate" or task.has_result
        task.become(TaskState.SUCCEEDED if is_done else TaskState.CANCELLED)
        machine.evaluating.unpin(task)
        machine.note("closed", f"{worker.worker_id} has closed {task.task_id}.", worker_id=worker.worker_id)
        machine.staff.free(worker)

    def failed(self, worker: Worker, task: Task, reply: Failed) -> None:
        """Takes an exception: the same worker, or another, tries once more."""
        machine, why = self._machine, f"{reply.error}: {reply.message}"
        machine.note("failed", f"{worker.worker_id}: {why}", worker_id=worker.worker_id, traceback=reply.traceback)
        self.retry(task, why, counts=True, for_good=reply.for_good)
        worker.call = None
        machine.staff.free(worker)
        machine.work.drive(worker)

    def go_back(self) -> None:
        """Has learners begin again with their latest checkpoint."""
        machine = self._machine
        for task in machine.tasks.open("learn"):
            worker = machine.roster.get(task.worker_id, task.incarnation)
            if machine.ending is None and task.state is TaskState.RUNNING and worker is not None:
                machine.note("restored", "The learner goes back to its latest checkpoint.")
                self.retry(task, "it was told to go back", counts=False)
                worker.call = None
                machine.staff.free(worker)
                machine.work.drive(worker)

    def retry(self, task: Task, why: str, *, counts: bool, for_good: bool = False) -> None:
        """Has another worker try, or the same one once more; a failure too many fails the job.

        Args:
            task: that was not finished.
            why: what happened.
            counts: whether it is the task's own failure.
            for_good: whether another try would end in the same way.
        """
        machine = self._machine
        machine.learning.lose_grant(task)
        if task.kind == "learn":
            machine.learning.waits("learner")
        if task.has_result:  # it was lost after it had done its work
            self._end(task, TaskState.SUCCEEDED)
            return
        is_surplus = task.index >= machine.wanted["collector"]
        if task.kind == "collect" and (machine.ending is not None or is_surplus):
            self._end(task, TaskState.CANCELLED)
            return
        task.failures += counts
        if for_good or task.failures > machine.limits.max_failures:
            self._end(task, TaskState.FAILED)
            if task.kind == "evaluate" and machine.ending is None:
                machine.note("evaluation", f"{task.task_id} was given up: {why}.")
            else:
                times = "" if for_good else f" {task.failures} times"
                machine.end(True, f"{task.task_id} failed{times}: {why}")
            return
        machine.accounts.retries += 1
        task.become(TaskState.RETRYING)
        task.become(TaskState.PENDING)
        for worker in machine.roster.of(_role_of(task)):
            if worker.task_id is None:
                machine.work.drive(worker)

    def give_up(self, task: Task) -> None:
        """Cancels a task, whoever is at it."""
        if not task.is_over:
            self._machine.learning.lose_grant(task)
            self._end(task, TaskState.CANCELLED)

    def _end(self, task: Task, state: TaskState) -> None:
        task.become(state)
        self._machine.evaluating.unpin(task)


def _role_of(task: Task) -> Role:
    return next(role for role, kind in KINDS.items() if kind == task.kind)
