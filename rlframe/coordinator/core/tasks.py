"""Functions that finish, retry or cancel a task.

function            state after the call                       when
`finish`            SUCCEEDED, FAILED, CANCELLED               the work is done or given up
`retry`             PENDING; FAILED after too many failures    the worker failed, was lost, or must restart
`cancel`            CANCELLED                                  the job ends before the task is done

`worker_tracking.py` has the functions that change the states of workers.
"""

from __future__ import annotations

from rlframe.coordinator.core import evaluations
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.job import TrainingJob
from rlframe.coordinator.core.records import Task
from rlframe.coordinator.messages import KINDS
from rlframe.coordinator.states import TaskState


def finish(job: TrainingJob, task: Task, state: TaskState) -> None:
    """Give a task its final state. Unpin the version that the task evaluated, if any.

    If the task belonged to a learner, pin the version that it saved, for evaluations that wait for this.
    """
    task.become(state)
    evaluations.unpin(job, task)
    if task.kind == "learn" and job.ending is None:  # the learner has saved, or will never save again
        evaluations.pin_saved_version(job, task.start.policy_id)


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
                evaluations.note_failure(job, why)
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
