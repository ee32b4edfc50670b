"""Choose the version that an evaluation is of: the learner saves it first, and it is pinned until the evaluation ends.

So a checkpoint holds every evaluated policy before its row is written. From the save to the pin, the learner waits.
"""

from __future__ import annotations

import dataclasses

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.job import TrainingJob
from rlframe.coordinator.core.records import Task
from rlframe.coordinator.messages import StartTask
from rlframe.coordinator.states import TaskState


def evaluate(job: TrainingJob, policy_id: str) -> Task:
    """Begin an evaluation of the newest version of a policy."""
    job.accounts.evaluated_at = job.accounts.env_steps
    if job.requests.wanted["evaluator"] < 1:
        job.request_workers("evaluator", 1)
    task = job.tasks.add(StartTask("evaluate", policy_id, {"params_version": -1}))
    choose_version(job, task)
    job.note("evaluation", f"The newest version of {policy_id} is to be evaluated ({task.task_id}).")
    return task


def choose_version(job: TrainingJob, task: Task) -> None:
    """Ask the policy's learner to save. Without a learner, or at the end of a job: pin the newest version."""
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
    """Return True until the version that this learner saved is pinned: it must not publish another one before."""
    return bool(_without_version(job, learn.start.policy_id))


def pin_saved_version(job: TrainingJob, policy_id: str) -> None:
    """Pin the newest version, which the learner has saved, for the evaluations that wait for it."""
    for task in _without_version(job, policy_id):
        if task.save_deadline is not None:
            _pin(job, task)


def end_overdue_saves(job: TrainingJob) -> None:
    """Evaluate a version that is not saved if the learner takes too long: it may be dead, or its update too slow."""
    for task in job.tasks.open("evaluate"):
        if task.save_deadline is not None and job.now > task.save_deadline:
            text = f"no learner has saved {task.start.policy_id} within {job.limits.progress_deadline:g} s"
            job.note("evaluation", f"{task.task_id} is logged before its checkpoint: {text}.")
            _pin(job, task)


def _pin(job: TrainingJob, task: Task) -> None:
    task.save_deadline = None
    job.emit(ev.Pin(task.task_id, task.start.policy_id))


def on_pinned(job: TrainingJob, event: ev.Pinned) -> None:
    """Note the version that was pinned for an evaluation. Wake the evaluator, and the learner."""
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
    """Release the version of an evaluation that has ended."""
    if task.kind == "evaluate" and has_version(task):
        job.emit(ev.Unpin(task.start.policy_id, task.start.options["params_version"]))


def has_version(task: Task) -> bool:
    """Return True if the version of this evaluation has been pinned."""
    return task.start.options["params_version"] >= 0


def note_failure(job: TrainingJob, why: str) -> None:
    """Note why the last evaluation failed; the first reason counts. The job does not fail: the policy is saved."""
    if job.ending is not None and job.ending.evaluation_error is None:
        job.ending.evaluation_error = why
        job.ending.add_problem(f"the last evaluation failed: {why}")


def _without_version(job: TrainingJob, policy_id: str) -> list[Task]:
    """The open evaluations of a policy whose version is not pinned yet."""
    tasks = [task for task in job.tasks.open("evaluate") if task.start.policy_id == policy_id]
    return [task for task in tasks if not has_version(task)]
