"""Evaluate a version of the policy, and finish, retry or cancel a task.

function            state after the call                       when
`finish`            SUCCEEDED, FAILED, CANCELLED               the work is done or given up
`retry`             PENDING; FAILED after too many failures    the worker failed, was lost, or must restart
`cancel`            CANCELLED                                  the job ends before the task is done

`worker_tracking.py` has most functions that change the states of workers.

Before an evaluation, the learner saves, and the saved version is pinned until the evaluation ends. So each evaluated
policy is in a checkpoint before the result of the evaluation is written. Between the save and the pin, the learner is
not called, so that it publishes no newer version.
"""

from __future__ import annotations

import dataclasses

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.job import TrainingJob
from rlframe.coordinator.core.records import Task
from rlframe.coordinator.messages import KINDS, StartTask
from rlframe.coordinator.states import TaskState


def evaluate(job: TrainingJob, policy_id: str) -> Task:
    """Start an evaluation of the newest version of a policy."""
    job.accounts.evaluated_at = job.accounts.env_steps
    if job.requests.wanted["evaluator"] < 1:
        job.request_workers("evaluator", 1)
    task = job.tasks.add(StartTask("evaluate", policy_id, {"params_version": -1}))
    choose_version(job, task)
    job.note("evaluation", f"Evaluating the newest version of {policy_id} ({task.task_id}).")
    return task


def choose_version(job: TrainingJob, task: Task) -> None:
    """Ask the policy's learner to save. Without a learner, or at the end of the job, pin the newest version at once."""
    learners = [each for each in job.tasks.open("learn") if each.start.policy_id == task.start.policy_id]
    if job.ending is None and learners:
        task.save_deadline = job.now + job.limits.progress_deadline
        job.queue_call(*job.roster.of("learner"))
    else:
        _pin(job, task)


def needs_save(job: TrainingJob, learn: Task) -> bool:
    """Return True if an evaluation waits for this learner to save."""
    return job.ending is None and any(
        task.save_deadline is not None for task in _without_version(job, learn.start.policy_id)
    )


def blocks_learner(job: TrainingJob, learn: Task) -> bool:
    """Return True while an evaluation has no pinned version. In this time, the learner must not publish a version."""
    return bool(_without_version(job, learn.start.policy_id))


def pin_saved_version(job: TrainingJob, policy_id: str) -> None:
    """Pin the newest version for the waiting evaluations. The learner has saved this version."""
    for task in _without_version(job, policy_id):
        if task.save_deadline is not None:
            _pin(job, task)


def end_overdue_saves(job: TrainingJob) -> None:
    """If the learner has not saved before the deadline, evaluate the newest version without a checkpoint."""
    for task in job.tasks.open("evaluate"):
        if task.save_deadline is not None and job.now > task.save_deadline:
            text = f"no learner saved {task.start.policy_id} within {job.limits.progress_deadline:g} s"
            job.note("evaluation", f"{task.task_id} starts without a checkpoint of its version: {text}.")
            _pin(job, task)


def _pin(job: TrainingJob, task: Task) -> None:
    task.save_deadline = None
    job.emit(ev.Pin(task.task_id, task.start.policy_id))


def on_pinned(job: TrainingJob, event: ev.Pinned) -> None:
    """Set the version of an evaluation to the pinned version. Then choose the next calls to evaluators and learners."""
    task = job.tasks.get(event.task_id)
    if task is None or task.is_over:
        if event.params_version >= 0:
            job.emit(ev.Unpin(event.policy_id, event.params_version))
    elif event.params_version < 0:
        task.become(TaskState.CANCELLED)
    else:
        task.start = dataclasses.replace(task.start, options={"params_version": event.params_version})
        job.queue_call(*job.roster.of("evaluator"))
    job.queue_call(*job.roster.of("learner"))


def unpin(job: TrainingJob, task: Task) -> None:
    """Unpin the version of an evaluation that has ended."""
    if task.kind == "evaluate" and has_version(task):
        job.emit(ev.Unpin(task.start.policy_id, task.start.options["params_version"]))


def has_version(task: Task) -> bool:
    """Return True if the evaluation has a pinned version."""
    return task.start.options["params_version"] >= 0


def note_failure(job: TrainingJob, why: str) -> None:
    """Record the first failure of the last evaluation. The job does not fail, because the policy is saved."""
    if job.ending is not None and job.ending.evaluation_error is None:
        job.ending.evaluation_error = why
        job.ending.add_problem(f"the last evaluation failed: {why}")


def _without_version(job: TrainingJob, policy_id: str) -> list[Task]:
    """Return the policy's open evaluations that still have no pinned version."""
    open_tasks = job.tasks.open("evaluate")
    return [task for task in open_tasks if task.start.policy_id == policy_id and not has_version(task)]


def finish(job: TrainingJob, task: Task, state: TaskState) -> None:
    """Give a task its final state. Unpin the version that the task evaluated, if any.

    If the task belonged to a learner, pin the version that it saved, for evaluations that wait for this.
    """
    task.become(state)
    unpin(job, task)
    if task.kind == "learn" and job.ending is None:  # the learner has saved, or will never save again
        pin_saved_version(job, task.start.policy_id)


def retry(job: TrainingJob, task: Task, why: str, *, counts: bool, is_permanent: bool = False) -> None:
    """Make a task pending, so that a worker retries it. After too many failures, give the task up instead.

    If the task is given up, the job fails too, except if the task is an evaluation.

    Args:
        job: The job.
        task: The task.
        why: Reason of the retry.
        counts: True to count the retry as a failure of the task.
        is_permanent: True to give the task up at once, because a retry would fail in the same way.
    """
    lose_grant(job, task)
    if task.kind == "learn":
        job.learner.wait_for("learner", job.now)
    if task.has_result:  # the evaluation is done; its worker only had to close the task
        finish(job, task, TaskState.SUCCEEDED)
        return
    is_surplus = task.index >= job.requests.wanted["collector"]
    if task.kind == "collect" and (job.ending is not None or is_surplus):
        finish(job, task, TaskState.CANCELLED)
        return
    task.failures += counts
    if is_permanent or task.failures > job.limits.max_failures:
        finish(job, task, TaskState.FAILED)
        if task.kind == "evaluate":
            job.note("evaluation", f"{task.task_id} was given up: {why}.")
            if job.ending is not None and task.task_id == job.ending.task_id:
                note_failure(job, why)
        else:
            times = "" if is_permanent else f" {task.failures} times"
            job.fail(f"{task.task_id} failed{times}: {why}")
        return
    job.accounts.retries += 1
    task.become(TaskState.RETRYING)
    task.become(TaskState.PENDING)
    job.queue_call(*(worker for worker in job.roster if KINDS[worker.role] == task.kind))


def cancel(job: TrainingJob, task: Task) -> None:
    """Cancel a task."""
    if not task.is_over:
        lose_grant(job, task)
        finish(job, task, TaskState.CANCELLED)


def lose_grant(job: TrainingJob, task: Task) -> None:
    """Count the batches in a learner's pending call as lost."""
    if task.batches:
        job.emit(ev.FinishBatches(task.batches, ()))
    job.accounts.lost += task.granted
    task.granted, task.batches, task.drawing = 0, (), None


def return_grant(job: TrainingJob, task: Task) -> None:
    """Take back the batches of a call that the learner did not carry out. Batches that were already drawn are lost."""
    if not task.batches:
        job.accounts.granted -= task.granted
        task.granted = 0
    lose_grant(job, task)
