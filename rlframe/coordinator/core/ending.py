"""How a job ends: collectors close, then the learner, then the last version is evaluated, then everybody goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.tasks import Task
from rlframe.coordinator.messages import Evaluated, Role
from rlframe.coordinator.states import JobState, TaskState, WorkerState, is_over

if TYPE_CHECKING:
    from rlframe.coordinator.core.machine import Machine

_STEPS = ("collectors", "learner", "evaluation", "disconnect")


class Ending:
    """The steps of it, each with a deadline. It was begun for one reason, and no other replaces that.

    Args:
        machine: whose job it is.
        reason: why the job ends.
        failed: whether it failed.
        evaluates: whether the last version is evaluated.

    Attributes:
        evaluation: what the evaluation of the last version gave.
    """

    def __init__(self, machine: Machine, reason: str, *, failed: bool, evaluates: bool) -> None:
        self._machine, self.reason, self.failed, self._evaluates = machine, reason, failed, evaluates
        self._step, self._since = "collectors", machine.now
        self._close_within = machine.limits.close_deadline
        self._task_id: str | None = None  # of the last evaluation
        self.evaluation: dict[str, Any] | None = None
        if machine.state is not JobState.DRAINING:
            machine.become(JobState.DRAINING)
        machine.note("draining", f"The job ends: {reason}.", failed=failed)
        self._begin_step()

    def to_json(self) -> dict[str, Any]:
        """For the journal."""
        return {
            "reason": self.reason,
            "failed": self.failed,
            "evaluates": self._evaluates,
            "step": self._step,
            "evaluation": self.evaluation,
            "task_id": self._task_id,
        }

    @classmethod
    def from_json(cls, machine: Machine, saved: dict[str, Any], now: float) -> Ending:
        """Goes on with the step at which the coordinator was killed; its deadline begins anew."""
        ending = cls.__new__(cls)
        ending._machine, ending.reason, ending.failed = machine, saved["reason"], saved["failed"]
        ending._evaluates, ending._step, ending._since = saved["evaluates"], saved["step"], now
        ending._task_id, ending.evaluation = saved["task_id"], saved["evaluation"]
        ending._close_within = machine.limits.close_deadline
        return ending

    @property
    def wants_learner(self) -> bool:
        """Whether a learner is still to save: then one that was lost is started again."""
        return self._step in ("collectors", "learner") and not self.failed

    def replaces(self, role: Role) -> bool:
        """Whether a worker of this role that is lost now is replaced."""
        if role == "evaluator":
            return self._step != "disconnect"
        return role == "learner" and self.wants_learner

    def closes(self, task: Task) -> bool:
        """Whether the task is to be closed now."""
        if task.kind == "collect":
            return True
        if task.kind == "learn":
            return self._step != "collectors"
        return task.task_id != self._task_id

    def hurry(self, within: float | None) -> None:
        """The evaluation is not wanted any more, and tasks are to close within so many seconds."""
        self._evaluates = False
        self._close_within = within or self._close_within

    def fail(self, why: str) -> None:
        """It does not end well: nothing is evaluated any more. The first such reason is kept."""
        if not self.failed:
            self.failed, self.reason = True, f"{self.reason}; but {why}"
            self._machine.reason = self.reason

    def evaluated(self, task: Task, reply: Evaluated) -> None:
        """Takes the result of an evaluation, where it is the last one."""
        if task.task_id == self._task_id:
            self.evaluation = {**reply.values, "params_version": reply.params_version}

    def disconnected(self, why: str) -> None:
        """Everybody has gone: the job is over."""
        if why:
            self._machine.note("operator", f"The operator did not let go of its workers: {why}.")
        self._machine.close(self.failed, self.reason)

    def go_on(self, now: float) -> None:
        """Takes the next steps, as far as the ones before are done."""
        if self._machine.state is JobState.CONNECTING:  # restarted in the middle of it
            self._machine.become(JobState.DRAINING)
            self._begin_step()
        while self._step != "disconnect" and self._is_done(now):
            self._step = _STEPS[_STEPS.index(self._step) + 1]
            self._since = now
            self._begin_step()
        deadline = self._machine.limits.close_deadline
        if self._step == "disconnect" and now - self._since > deadline and not is_over(self._machine.state):
            self.disconnected(f"it did not answer within {deadline:g} s")

    def _begin_step(self) -> None:
        machine = self._machine
        is_evaluated = self._evaluates and not self.failed and machine.accounts.params_version >= 0
        if self._step == "evaluation":
            machine.collecting.write_row()  # the last one of the training: it took no more time than that did
        if self._step == "evaluation" and is_evaluated:
            if machine.tasks.get(self._task_id) is None:
                self._task_id = machine.evaluating.begin(machine.commander.final_policy()).task_id
        elif self._step == "disconnect":
            for task in machine.tasks:
                machine.outcomes.give_up(task)
            machine.emit(ev.Disconnect())
        machine.work.drive_all()

    def _is_done(self, now: float) -> bool:
        machine, waited = self._machine, now - self._since
        if self._step == "evaluation":
            return self._is_evaluated(waited)
        tasks = machine.tasks.open("collect" if self._step == "collectors" else "learn")
        if self._step == "collectors" or not self.wants_learner or not machine.learner_came:
            tasks = [task for task in tasks if task.is_live or self._may_be_at_work(task)]
        if not tasks:
            return True
        if waited <= self._close_within:
            return False
        overdue = f"{', '.join(task.task_id for task in tasks)} did not close within {self._close_within:g} s"
        machine.note("overdue", f"{overdue}.")
        if self._step == "learner" and machine.learner_came:
            self.fail(overdue)
        for task in tasks:
            machine.outcomes.give_up(task)
        return True

    def _may_be_at_work(self, task: Task) -> bool:
        """Whether the coordinator was restarted, and has yet to hear from who was at the task."""
        worker = self._machine.roster.get(task.worker_id, task.incarnation)
        if task.attempt < 0:
            return False
        if worker is None:
            return not self._machine.operator_answered
        return worker.state in (WorkerState.REQUESTED, WorkerState.CONNECTING)

    def _is_evaluated(self, waited: float) -> bool:
        task, deadline = self._machine.tasks.get(self._task_id), self._machine.limits.evaluation_deadline
        if self._task_id is None or task is None or not self._evaluates or self.failed:
            return True
        if task.is_over:
            if task.state is not TaskState.SUCCEEDED:
                self.fail(f"the last evaluation ({task.task_id}) did not succeed")
            return True
        if waited > deadline:
            self.fail(f"the last evaluation was not done within {deadline:g} s")
            return True
        return False
