"""Batches: drawn for a learner or granted to it, out with it, learned from, dropped or lost. Each is counted once."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.roster import Worker
from rlframe.coordinator.core.tasks import Task
from rlframe.coordinator.messages import Demand, Learn, Learned, Started

if TYPE_CHECKING:
    from rlframe.coordinator.core.machine import Machine

_LATER = 0.05  # seconds before a learner that can take no batch is asked again
_MUCH_LATER = 1.0  # the same, where the replay buffer raised


class Learning:
    """What learners are told to learn from, and what comes of it.

    Args:
        machine: whose learners they are.
        by_key: whether a learner is told which items to learn from; else it draws them itself.

    Attributes:
        waits_for: what keeps the learner from learning: "data", "learner" (there is none), or None.
    """

    def __init__(self, machine: Machine, by_key: bool) -> None:
        self._machine, self._by_key = machine, by_key
        self.waits_for: str | None = "learner"
        self._waited, self._wait_began = 0.0, machine.now
        self._saves = False
        self._fails_since: float | None = None  # when the replay buffer began to raise with every draw

    @property
    def waited(self) -> float:
        """Seconds in all that the learner has waited for data."""
        return self._waited + (self._machine.now - self._wait_began if self.waits_for == "data" else 0.0)

    def waits(self, what: str | None) -> None:
        """Notes what the learner waits for from now on."""
        if what != self.waits_for:
            self._waited, self._wait_began = self.waited, self._machine.now
            self.waits_for = what

    def save(self) -> None:
        """Has the learner write a checkpoint with its next update."""
        self._saves = True

    def began(self, reply: Started) -> None:
        """Takes what a learner begins with."""
        accounts = self._machine.accounts
        accounts.learner_steps = int(reply.info.get("learner_steps", accounts.learner_steps))
        accounts.params_version = max(accounts.params_version, int(reply.info.get("params_version", -1)))
        self.waits(None)

    def demanded(self, worker: Worker, task: Task, reply: Demand) -> None:
        """Draws or grants as many batches as the learner can take."""
        machine = self._machine
        count = min(reply.batches, machine.limits.grant)
        if count <= 0 or machine.work.is_to_close(worker, task) or machine.paused:
            task.again_at = machine.now + _LATER
        elif self._by_key:
            task.drawing = machine.work.header(worker, task)
            machine.emit(ev.Draw(task.drawing, count))
        else:
            self._learn(worker, task, Learn(count))

    def drawn(self, event: ev.Drawn) -> None:
        """Has the learner learn from what was drawn for it, if it still can."""
        machine = self._machine
        task = machine.tasks.get(event.header.task_id)
        worker = machine.roster.get(event.header.worker_id, event.header.incarnation)
        is_awaited = task is not None and task.drawing == event.header
        if task is not None and is_awaited:
            task.drawing = None
            task.again_at = machine.now + _MUCH_LATER if event.why else task.again_at
        self._judge(event)
        if task is None or not is_awaited or worker is None or not worker.answers:
            machine.accounts.granted += len(event.batches)
            machine.accounts.lost += len(event.batches)
            if event.batches:
                machine.emit(ev.Settle(event.batches, ()))
        elif event.batches:
            task.batches = event.batches
            self._learn(worker, task, Learn(len(event.batches), event.batches))
        else:
            self.waits("data")
            machine.work.drive(worker)

    def _judge(self, event: ev.Drawn) -> None:
        """A replay buffer that raises is asked again for a while, and not for ever."""
        machine, deadline = self._machine, self._machine.limits.progress_deadline
        if not event.why:
            self._fails_since = None
        elif self._fails_since is None:
            self._fails_since = machine.now
            machine.note("replay", f"The replay buffer gives no batches; it is asked again. {event.why}")
        elif machine.now - self._fails_since > deadline:
            machine.end(True, f"the replay buffer has given no batches for {deadline:g} s: {event.why}")

    def _learn(self, worker: Worker, task: Task, learn: Learn) -> None:
        learn, self._saves = dataclasses.replace(learn, save=self._saves), False
        task.granted = learn.count
        self._machine.accounts.granted += learn.count
        self._machine.work.call(worker, task, "learn", learn)

    def learned(self, task: Task, reply: Learned) -> None:
        """Takes what came of a grant."""
        accounts = self._machine.accounts
        self.waits(None)
        accounts.learn(reply)
        told = len(reply.updates) + reply.dropped
        if task.batches:
            self._machine.emit(ev.Settle(task.batches, reply.updates, reply.params_version))
            accounts.dropped += task.granted - told  # a batch that was drawn is not drawn again
        else:
            accounts.granted -= task.granted - told
        task.granted, task.batches = 0, ()

    def give_back(self, task: Task) -> None:
        """Takes a grant back of which nothing was learned."""
        if not task.batches:
            self._machine.accounts.granted -= task.granted
            task.granted = 0
        self.lose_grant(task)

    def lose_grant(self, task: Task) -> None:
        """What was out with a learner is lost."""
        if task.batches:
            self._machine.emit(ev.Settle(task.batches, ()))
        self._machine.accounts.lost += task.granted
        task.granted, task.batches, task.drawing = 0, (), None
