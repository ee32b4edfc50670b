"""Evaluations: each is of exactly one version, which is kept for it until it is done."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.roster import Worker
from rlframe.coordinator.core.tasks import Task
from rlframe.coordinator.messages import Evaluated, Failed, StartTask
from rlframe.coordinator.states import TaskState

if TYPE_CHECKING:
    from rlframe.coordinator.core.machine import Machine

_IN_A_ROW = ("return_mean", "return_std", "length_mean", "episodes")


class Evaluating:
    """Has policies evaluated, and takes the results.

    Args:
        machine: whose policies they are.

    Attributes:
        began_at: environment steps at which the newest evaluation was begun.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.began_at = 0

    def begin(self, policy_id: str) -> Task:
        """Has the newest version of a policy evaluated."""
        machine = self._machine
        self.began_at = machine.accounts.env_steps
        machine.want("evaluator", 1)
        task = machine.tasks.add(StartTask("evaluate", policy_id, {"params_version": -1}))
        machine.emit(ev.Pin(task.task_id, policy_id))
        machine.note("evaluation", f"The newest version of {policy_id} is to be evaluated ({task.task_id}).")
        return task

    def take_up(self) -> None:
        """Goes on with those that a coordinator that was killed had begun."""
        for task in self._machine.tasks.open("evaluate"):
            if task.has_result:
                task.become(TaskState.SUCCEEDED)
                self.unpin(task)
            elif task.start.options["params_version"] < 0:  # which version was kept is not known
                self._machine.emit(ev.Pin(task.task_id, task.start.policy_id))

    def pinned(self, event: ev.Pinned) -> None:
        """Now it is known which version the evaluation is of."""
        task = self._machine.tasks.get(event.task_id)
        if task is None or task.is_over:
            if event.params_version >= 0:
                self._machine.emit(ev.Unpin(event.policy_id, event.params_version))
        elif event.params_version < 0:
            task.become(TaskState.CANCELLED)
        else:
            task.start = dataclasses.replace(task.start, options={"params_version": event.params_version})
            for worker in self._machine.roster.of("evaluator"):
                self._machine.work.drive(worker)

    def evaluated(self, worker: Worker, task: Task, reply: Evaluated) -> None:
        """Takes a result, if it is of the version that was to be evaluated."""
        machine, wanted = self._machine, task.start.options["params_version"]
        if reply.params_version != wanted:
            why = f"it evaluated version {reply.params_version}, not {wanted}"
            machine.outcomes.failed(worker, task, Failed("Mismatch", why))
            return
        machine.accounts.note_evaluation(reply.values["return_mean"], reply.params_version)
        if machine.ending is not None:
            machine.ending.evaluated(task, reply)
        text = f"Version {reply.params_version}: mean return {reply.values['return_mean']:g}"
        machine.note("evaluated", text, params_version=reply.params_version, **reply.values)
        machine.emit(ev.Row(machine.accounts.env_steps, {name: reply.values[name] for name in _IN_A_ROW}))
        task.has_result = True
        task.become(TaskState.CLOSING)

    def unpin(self, task: Task) -> None:
        """Lets go of the version that an evaluation is of."""
        if task.kind == "evaluate" and task.start.options["params_version"] >= 0:
            self._machine.emit(ev.Unpin(task.start.policy_id, task.start.options["params_version"]))
