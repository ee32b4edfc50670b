"""What workers are told to do, in the order of the diagram, and what their answers mean."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.roster import Call, Worker
from rlframe.coordinator.core.tasks import Task
from rlframe.coordinator.messages import (
    KINDS,
    Closed,
    Collected,
    Demand,
    Evaluated,
    Failed,
    GetData,
    Header,
    Learned,
    NotReady,
    Refused,
    Reply,
    Started,
)
from rlframe.coordinator.states import TaskState, WorkerState

if TYPE_CHECKING:
    from rlframe.coordinator.core.machine import Machine

_AGAIN = 0.02  # seconds before a call that was not done is said again; the worker itself waits for some tenths
_WAITS_FOR = ("data", "params", "room", "paused")  # for what a worker may wait as long as it takes


class Work:
    """Gives tasks to workers, and says one call after another to each.

    Args:
        machine: whose tasks they are.
        seq: the number of the last call; those of a coordinator that was killed are below it.
    """

    def __init__(self, machine: Machine, seq: int) -> None:
        self._machine, self._seq = machine, seq

    # --- what comes next

    def drive(self, worker: Worker) -> None:
        """Says to a worker what comes next in the diagram, unless a call is out, or nothing does."""
        if worker.call is not None or not worker.answers:
            return
        task = self._machine.tasks.get(worker.task_id)
        if task is None:
            if not worker.leaves:
                self._assign(worker)
        elif task.state is TaskState.ASSIGNED:
            start = task.start
            if task.kind == "learn":
                above = max(self._machine.accounts.params_version, self._machine.min_version)
                options = {**start.options, "min_version": above}
                start = dataclasses.replace(start, options=options)
            self.call(worker, task, "start_task", start)
        elif task.state is TaskState.RUNNING:
            self._next_call(worker, task)
        elif task.state is TaskState.CLOSING:
            self._close_task(worker, task)

    def drive_all(self) -> None:
        """The same for everybody."""
        for worker in self._machine.roster:
            self.drive(worker)

    def _next_call(self, worker: Worker, task: Task) -> None:
        machine = self._machine
        if self.is_to_close(worker, task):
            if task.drawing is None:
                task.become(TaskState.CLOSING)
                self._close_task(worker, task)
        elif task.kind == "evaluate":
            self.call(worker, task, "get_data", GetData())
        elif machine.paused or machine.now < task.again_at or (machine.ending is not None and task.kind == "learn"):
            worker.progress_at = machine.now
        elif task.kind == "collect":
            self.call(worker, task, "get_data", GetData(seconds=machine.limits.slice))
        elif task.drawing is None:
            self.call(worker, task, "data_demand")

    def is_to_close(self, worker: Worker, task: Task) -> bool:
        """Whether the worker is to close the task as soon as it can."""
        ending = self._machine.ending
        return worker.leaves or (ending is not None and ending.closes(task))

    def _close_task(self, worker: Worker, task: Task) -> None:
        if not worker.leaves:
            worker.become(WorkerState.CLOSING)
        self.call(worker, task, "close_task", self._machine.ending is not None)

    def _assign(self, worker: Worker) -> None:
        task = self._task_for(worker)
        if task is None:
            return
        task.become(TaskState.ASSIGNED)
        task.attempt += 1
        task.worker_id, task.incarnation = worker.worker_id, worker.incarnation
        worker.task_id, worker.progress_at = task.task_id, self._machine.now
        worker.become(WorkerState.BUSY)
        # The number of the attempt is in the journal before anybody hears of it: no two workers ever have the same.
        self._machine.note("assigned", f"{worker.worker_id} is to do {task.task_id}, attempt {task.attempt}.")
        self.drive(worker)

    def _task_for(self, worker: Worker) -> Task | None:
        """A task that waits for such a worker, or a new one that the commander has for it."""
        machine, kind, ending = self._machine, KINDS[worker.role], self._machine.ending
        if kind == "collect" and (ending is not None or machine.paused or not machine.learner_came):
            return None
        if kind == "learn" and ending is not None and not ending.wants_learner:
            return None
        open_tasks = machine.tasks.open(kind)
        for task in open_tasks:
            is_meant = kind != "collect" or task.index == worker.index
            is_known = kind != "evaluate" or task.start.options["params_version"] >= 0
            if kind == "evaluate" and ending is not None and ending.closes(task):
                continue
            if task.state is TaskState.PENDING and is_meant and is_known:
                return task
        if ending is not None or kind == "evaluate":
            return None
        start = machine.commander.task(worker.role, worker.index, machine.view)
        if start is None:
            return None
        if kind == "learn" and any(task.start.policy_id == start.policy_id for task in open_tasks):
            return None  # one learner for each policy
        if kind == "learn":
            # Above those of all before, of this session and of others whose param store this one goes on with.
            epochs = [task.start.options.get("epoch", 0) for task in machine.tasks if task.kind == "learn"]
            epoch = max([int(machine.now * 1000), *(before + 1 for before in epochs)])
            start = dataclasses.replace(start, options={**start.options, "epoch": epoch})
        return machine.tasks.add(start, worker.index)

    # --- calls

    def header(self, worker: Worker, task: Task) -> Header:
        """What the next call belongs to: its number is above all before."""
        self._seq += 1
        return Header(task.task_id, task.attempt, worker.worker_id, worker.incarnation, self._seq)

    def call(self, worker: Worker, task: Task, method: str, *args: Any) -> None:
        """Calls a worker."""
        worker.call = Call(method, self.header(worker, task), args)
        self._say(worker, worker.call, 0.0)

    def _say(self, worker: Worker, call: Call, delay: float) -> None:
        worker.said_at = self._machine.now + delay
        send = ev.Send(worker.worker_id, worker.incarnation, call.method, call.header, call.args, delay)
        self._machine.emit(send)

    def _say_again(self, worker: Worker, call: Call, delay: float) -> None:
        if self._machine.now >= worker.said_at:  # else an answer came twice, and the call is about to be said already
            self._say(worker, call, delay)

    # --- answers

    def unanswered(self, event: ev.Unanswered) -> None:
        """A call is said again, with the same number."""
        worker = self._machine.roster.get(event.worker_id, event.incarnation)
        if worker is None:
            return
        if event.header is None:
            worker.ping_out = worker.ping_out and event.method != "ping"
        elif worker.call is not None and worker.call.header == event.header:
            self._say_again(worker, worker.call, self._machine.limits.retry_after)

    def replied(self, event: ev.Replied) -> None:
        """Takes the answer that was waited for; any other changes nothing."""
        machine = self._machine
        worker = machine.roster.get(event.worker_id, event.incarnation)
        if worker is None:
            machine.accounts.stale += 1
        elif event.header is None:
            machine.staff.answered_ping(worker, event.reply)
        elif worker.call is None or worker.call.header != event.header:
            machine.accounts.stale += 1  # and no sign of life: it may have been on its way for long
        else:
            machine.staff.hear(worker)
            self._answered(worker, worker.call, event.reply)

    def _answered(self, worker: Worker, call: Call, reply: Reply) -> None:
        machine = self._machine
        task = machine.tasks.get(call.header.task_id)
        if task is None or task.is_over:
            worker.call = None
            machine.staff.free(worker)
            return
        if isinstance(reply, NotReady):
            self._not_ready(worker, task, call, reply)
            return
        worker.call, worker.progress_at = None, machine.now
        if isinstance(reply, Failed):
            machine.outcomes.failed(worker, task, reply)
            return
        if isinstance(reply, Refused):
            machine.outcomes.failed(worker, task, Failed("Refused", f"it refused {call.method}: {reply.why}"))
            return
        if isinstance(reply, Started):
            self._started(worker, task, reply)
        elif isinstance(reply, Demand):
            machine.learning.demanded(worker, task, reply)
        elif isinstance(reply, Learned):
            machine.learning.learned(task, reply)
        elif isinstance(reply, Collected):
            machine.collecting.collected(worker, reply)
        elif isinstance(reply, Evaluated):
            machine.evaluating.evaluated(worker, task, reply)
        elif isinstance(reply, Closed):
            machine.outcomes.closed(worker, task, reply)
        self.drive(worker)

    def _not_ready(self, worker: Worker, task: Task, call: Call, reply: NotReady) -> None:
        if reply.why in _WAITS_FOR:
            worker.progress_at = self._machine.now
            if call.method == "learn":
                self._machine.learning.waits("data")
            if call.method in ("learn", "get_data") and self.is_to_close(worker, task):
                if call.method == "learn":
                    self._machine.learning.give_back(task)
                worker.call = None
                self.drive(worker)
                return
        if call.method == "get_data" and task.kind == "collect":
            self._machine.collecting.note_pace(worker, reply.why in _WAITS_FOR)
        self._say_again(worker, call, _AGAIN)

    def _started(self, worker: Worker, task: Task, reply: Started) -> None:
        machine = self._machine
        task.become(TaskState.RUNNING)
        task.started_at = machine.now
        worker.num_envs = int(reply.info.get("num_envs", 0))
        machine.note("started", f"{worker.worker_id} is at {task.task_id}.", worker_id=worker.worker_id, **reply.info)
        if task.kind == "learn":
            machine.learning.began(reply)
            machine.learner_came = True
            for other in machine.roster:  # collectors waited for the buffer to be there
                if other is not worker:
                    self.drive(other)
