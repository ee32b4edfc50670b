"""The next call of each worker, in the order of docs/coordinator.md, and the function that takes its answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rlframe.coordinator.core import evaluations, results, tasks, worker_tracking
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.job import TrainingJob
from rlframe.coordinator.core.records import KnownWorker, Task
from rlframe.coordinator.messages import (
    KINDS,
    CallRefused,
    Closed,
    Collected,
    Demand,
    Evaluated,
    Failed,
    GetData,
    Learn,
    Learned,
    NotReady,
    Role,
    Started,
    WorkerReply,
)
from rlframe.coordinator.states import TaskState, WorkerState

_AGAIN = 0.02  # seconds before a call that was not done is repeated; the worker itself waits for some tenths


# --- the next call


def call_next(job: TrainingJob, worker: KnownWorker) -> None:
    """Make a worker's next call, unless a call is out or there is nothing to do."""
    if worker.call is not None or not worker.can_be_called:
        return
    task = job.tasks.get(worker.task_id)
    if task is None and not worker.is_leaving:
        task = _assign(job, worker)
    if task is None:
        return
    if task.state is TaskState.ASSIGNED:
        start = task.start
        if task.kind == "learn":
            above = max(job.accounts.params_version, job.min_version)
            start = dataclasses.replace(start, options={**start.options, "min_version": above})
        job.call(worker, task, "start_task", start)
    elif task.state is TaskState.RUNNING:
        _call_running(job, worker, task)
    elif task.state is TaskState.CLOSING:
        _close_task(job, worker, task)


def _call_running(job: TrainingJob, worker: KnownWorker, task: Task) -> None:
    if job.must_close(worker, task):
        if task.drawing is None:
            task.become(TaskState.CLOSING)
            _close_task(job, worker, task)
    elif task.kind == "evaluate":
        job.call(worker, task, "get_data", GetData())
    elif task.kind == "learn" and task.drawing is None and evaluations.needs_save(job, task):
        job.call(worker, task, "learn", Learn(0, save=True))
    elif _must_wait(job, task):
        return  # `worker_tracking.check_all` makes this call again
    elif task.kind == "collect":
        job.call(worker, task, "get_data", GetData(seconds=job.limits.slice))
    elif task.drawing is None:
        job.call(worker, task, "data_demand")


def _must_wait(job: TrainingJob, task: Task) -> bool:
    return (
        job.requests.paused
        or job.now < task.again_at
        or (task.kind == "learn" and (job.ending is not None or evaluations.holds_learner(job, task)))
    )


def _close_task(job: TrainingJob, worker: KnownWorker, task: Task) -> None:
    if not worker.is_leaving:
        worker.become(WorkerState.CLOSING)
    # The learner of the next task continues from the checkpoint of this one.
    job.call(worker, task, "close_task", job.ending is not None or task.kind == "learn")


def _assign(job: TrainingJob, worker: KnownWorker) -> Task | None:
    """Give a worker a task, if there is one for it."""
    task = _task_for(job, worker)
    if task is not None:
        task.become(TaskState.ASSIGNED)
        task.attempt += 1
        task.worker_id, task.incarnation = worker.worker_id, worker.incarnation
        worker.task_id = task.task_id
        worker.become(WorkerState.BUSY)
        # The number of the attempt is in the journal before anybody hears of it: no two workers ever have the same.
        told = [f"{name} {value}" for values in task.start.overrides.values() for name, value in values.items()]
        by = f" by {', '.join(told)}" if told else ""
        job.note("assigned", f"{worker.worker_id} is to do {task.task_id}, attempt {task.attempt}{by}.")
    return task


def _task_for(job: TrainingJob, worker: KnownWorker) -> Task | None:
    """Return a task that waits for such a worker, or a new task from the commander."""
    if not _may_work(job, worker.role):
        return None
    for task in job.tasks.open(KINDS[worker.role]):
        if task.state is TaskState.PENDING and _may_start(job, worker, task):
            return task
    if job.ending is not None or worker.role == "evaluator":  # `evaluations` adds the tasks of evaluators
        return None
    return _new_task(job, worker)


def _may_work(job: TrainingJob, role: Role) -> bool:
    """Return True if workers of this role may start a task now."""
    if role == "collector":
        return job.ending is None and not job.requests.paused and job.learner.has_started
    return role == "evaluator" or job.ending is None or job.ending.wants_learner


def _may_start(job: TrainingJob, worker: KnownWorker, task: Task) -> bool:
    """Return True if the worker may start this task, which waits for a worker of its role."""
    if task.kind == "evaluate":
        return evaluations.has_version(task) and (job.ending is None or not job.ending.closes(task))
    return task.kind == "learn" or task.index == worker.index


def _new_task(job: TrainingJob, worker: KnownWorker) -> Task | None:
    """Add the commander's task for a worker; there is one learner for each policy."""
    start = job.commander.task(worker.role, worker.index, job.view)
    if start is None:
        return None
    if worker.role == "learner":
        if any(task.start.policy_id == start.policy_id for task in job.tasks.open("learn")):
            return None
        start = dataclasses.replace(start, options={**start.options, "epoch": _next_epoch(job)})
    return job.tasks.add(start, worker.index)


def _next_epoch(job: TrainingJob) -> int:
    """Return an epoch of a learner above all earlier ones, also of sessions that used the same param store.

    It fences off earlier learners: see `rlframe.coordinator.param_store.Attempt`.
    """
    epochs = [task.start.options.get("epoch", 0) for task in job.tasks if task.kind == "learn"]
    return max([int(job.now * 1000), *(before + 1 for before in epochs)])


# --- answers


def unanswered(job: TrainingJob, event: ev.Unanswered) -> None:
    """Repeat the call, with the same number."""
    worker = job.roster.get(event.worker_id, event.incarnation)
    if worker is None:
        return
    if event.header is None:
        worker.ping.is_out = worker.ping.is_out and event.method != "ping"
    elif worker.call is not None and worker.call.header == event.header:
        job.call_again(worker, worker.call, job.limits.retry_after)


def replied(job: TrainingJob, event: ev.Replied) -> None:
    """Take the answer to the call that is out. Any other answer changes nothing."""
    worker = job.roster.get(event.worker_id, event.incarnation)
    if worker is None:
        job.accounts.stale += 1
    elif event.header is None:
        worker_tracking.answered_ping(job, worker, event.reply)
    elif worker.call is None or worker.call.header != event.header:
        job.accounts.stale += 1  # and no sign of life: it may have been on its way for long
    elif isinstance(event.reply, CallRefused) and event.reply.is_another:
        worker_tracking.lose(job, worker, worker_tracking.REPLACED)
    else:
        worker_tracking.note_alive(job, worker)
        _answered(job, worker, worker.call, job.tasks.get(event.header.task_id), event.reply)


def _answered(job: TrainingJob, worker: KnownWorker, call: ev.Send, task: Task | None, reply: WorkerReply) -> None:
    if task is None or task.is_over:
        worker_tracking.free(job, worker)
        return
    if isinstance(reply, NotReady):
        _not_ready(job, worker, task, call, reply)
        return
    worker.call = None
    if isinstance(reply, CallRefused):
        reply = Failed("Refused", f"it refused {call.method}: {reply.why}")
    is_healthy = task.state is TaskState.RUNNING and job.now - task.started_at > job.limits.healthy_after
    if is_healthy and not isinstance(reply, Failed):
        task.failures = 0
    _ANSWER_HANDLERS[type(reply)](job, worker, task, reply)
    job.queue_call(worker)


_ANSWER_HANDLERS: dict[type, Callable[[TrainingJob, KnownWorker, Task, Any], None]] = {
    Failed: results.failed,
    Started: results.started,
    Demand: results.demanded,
    Learned: results.learned,
    Collected: results.collected,
    Evaluated: results.evaluated,
    Closed: results.closed,
}


def _not_ready(job: TrainingJob, worker: KnownWorker, task: Task, call: ev.Send, reply: NotReady) -> None:
    waits = reply.waits_for is not None
    if waits:
        if call.method == "learn":
            job.learner.wait_for("data", job.now)
        if _is_put_off(job, worker, task, call):
            if call.method == "learn":
                tasks.return_grant(job, task)
            worker.call = None
            job.queue_call(worker)
            return
    if call.method == "get_data" and task.kind == "collect":
        results.note_pace(job, worker, waits)
    job.call_again(worker, call, _AGAIN)


def _is_put_off(job: TrainingJob, worker: KnownWorker, task: Task, call: ev.Send) -> bool:
    """Return True if a call that waits for data is given up for something more urgent."""
    if call.method == "learn" and not task.batches and evaluations.needs_save(job, task):
        return True
    return call.method in ("learn", "get_data") and job.must_close(worker, task)
