"""Choose the version of each evaluation: the learner saves, and the saved version is pinned until the evaluation ends.

So each evaluated policy is in a checkpoint before the result of the evaluation is written. Between the save and the
pin, the learner is not called, so that it publishes no newer version.
"""

from __future__ import annotations

import dataclasses

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.job import TrainingJob
from rlframe.coordinator.core.records import Task
from rlframe.coordinator.messages import StartTask
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
    tasks = [task for task in job.tasks.open("evaluate") if task.start.policy_id == policy_id]
    return [task for task in tasks if not has_version(task)]
