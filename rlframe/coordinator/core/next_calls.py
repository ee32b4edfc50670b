"""Choose the next call of each worker, for one worker after another. `replies.py` handles the replies."""

from __future__ import annotations

import dataclasses

from rlframe.coordinator.core import tasks
from rlframe.coordinator.core.job import TrainingJob
from rlframe.coordinator.core.records import Task, WorkerRecord
from rlframe.coordinator.messages import KINDS, GetData, Learn, Role
from rlframe.coordinator.states import TaskState, WorkerState


def call_next(job: TrainingJob, worker: WorkerRecord) -> None:
    """Send a worker its next call. Do nothing if a call is already pending or the worker has nothing to do."""
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


def _call_running(job: TrainingJob, worker: WorkerRecord, task: Task) -> None:
    if job.must_close(worker, task):
        if task.drawing is None:
            task.become(TaskState.CLOSING)
            _close_task(job, worker, task)
    elif task.kind == "evaluate":
        job.call(worker, task, "get_data", GetData())
    elif task.kind == "learn" and task.drawing is None and _must_save(job, task):
        job.requests.save_next_update = False
        job.call(worker, task, "learn", Learn(0, save=True))
    elif _must_wait(job, task):
        return  # `worker_tracking.check_all` queues the worker again
    elif task.kind == "collect":
        job.call(worker, task, "get_data", GetData(seconds=job.limits.slice))
    elif task.drawing is None:
        job.call(worker, task, "data_demand")


def _must_save(job: TrainingJob, task: Task) -> bool:
    """Return True if the learner must save now, without an update: for an evaluation, or because the job is paused."""
    return tasks.needs_save(job, task) or (job.requests.paused and job.requests.save_next_update)


def _must_wait(job: TrainingJob, task: Task) -> bool:
    return (
        job.requests.paused
        or job.now < task.retry_at
        or (task.kind == "learn" and (job.ending is not None or tasks.blocks_learner(job, task)))
    )


def _close_task(job: TrainingJob, worker: WorkerRecord, task: Task) -> None:
    if not worker.is_leaving:
        worker.become(WorkerState.CLOSING)
    # A learner saves a checkpoint when it closes its task, because the next learner continues from it.
    job.call(worker, task, "close_task", job.ending is not None or task.kind == "learn")


def _assign(job: TrainingJob, worker: WorkerRecord) -> Task | None:
    """Assign a task to a worker, if a task is available."""
    task = _task_for(job, worker)
    if task is not None:
        task.become(TaskState.ASSIGNED)
        task.attempt += 1
        task.worker_id, task.incarnation = worker.worker_id, worker.incarnation
        worker.task_id = task.task_id
        worker.become(WorkerState.BUSY)
        # The note below makes the coordinator write the journal before it sends the call. So a restarted coordinator
        # never uses an attempt number again.
        items = [f"{name} {value}" for values in task.start.overrides.values() for name, value in values.items()]
        by = f" with {', '.join(items)}" if items else ""
        job.note("assigned", f"{worker.worker_id} is assigned {task.task_id}, attempt {task.attempt}{by}.")
    return task


def _task_for(job: TrainingJob, worker: WorkerRecord) -> Task | None:
    """Return a pending task for the worker, or a new task from the commander."""
    if not _may_work(job, worker.role):
        return None
    for task in job.tasks.open(KINDS[worker.role]):
        if task.state is TaskState.PENDING and _may_start(job, worker, task):
            return task
    if job.ending is not None or worker.role == "evaluator":  # `tasks.evaluate` adds the tasks of evaluators
        return None
    return _new_task(job, worker)


def _may_work(job: TrainingJob, role: Role) -> bool:
    """Return True if a worker of this role may start a task now."""
    if role == "collector":
        return job.ending is None and not job.requests.paused and job.learner.has_started
    return role == "evaluator" or job.ending is None or job.ending.needs_learner


def _may_start(job: TrainingJob, worker: WorkerRecord, task: Task) -> bool:
    """Return True if the worker may start this pending task of its role."""
    if task.kind == "evaluate":
        return tasks.has_version(task) and (job.ending is None or not job.ending.closes(task))
    return task.kind == "learn" or task.index == worker.index


def _new_task(job: TrainingJob, worker: WorkerRecord) -> Task | None:
    """Ask the commander for a task, add it and return it. Return None if there is none.

    Each policy has at most one open task for a learner.
    """
    start = job.commander.task(worker.role, worker.index, job.view)
    if start is None:
        return None
    if worker.role == "learner":
        if any(task.start.policy_id == start.policy_id for task in job.tasks.open("learn")):
            return None
        start = dataclasses.replace(start, options={**start.options, "epoch": _next_epoch(job)})
    return job.tasks.add(start, worker.index)


def _next_epoch(job: TrainingJob) -> int:
    """Return a new epoch for a learner, greater than all earlier epochs, even those of earlier sessions.

    The param store refuses versions from learners with a lower epoch. See `rlframe.coordinator.param_store.Attempt`.
    """
    epochs = [task.start.options.get("epoch", 0) for task in job.tasks if task.kind == "learn"]
    return max([int(job.now * 1000), *(before + 1 for before in epochs)])
