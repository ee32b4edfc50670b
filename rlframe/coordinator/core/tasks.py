"""The lives of tasks, and of the workers that do them: they end, are tried again, or let go.

function              of whom   its state after                              when
`finish`              task      SUCCEEDED, FAILED, CANCELLED                  its work is done, or given up
`retry`               task      PENDING; FAILED after too many failures       its worker failed, or was lost
`cancel`              task      CANCELLED                                     the job ends without it
`restart_learners`    task      PENDING, from the latest checkpoint           a person asked for it
`free`                worker    IDLE; GONE if it leaves                       its task is closed
`release`             worker    GONE, and the operator ends its process       it leaves
`workers.remove`      worker    DRAINING, and GONE once its task is closed    there is one too many
`workers.lose`        worker    LOST, and the operator replaces it            it died, is silent, or was replaced
`workers.disconnect`  workers   GONE                                          the job ends
"""

from __future__ import annotations

from rlframe.coordinator.core import evaluations
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.job import TrainingJob
from rlframe.coordinator.core.records import KnownWorker, Task
from rlframe.coordinator.messages import KINDS
from rlframe.coordinator.states import TaskState, WorkerState


def finish(job: TrainingJob, task: Task, state: TaskState) -> None:
    """End a task, and what waits for it."""
    task.become(state)
    evaluations.unpin(job, task)
    if task.kind == "learn" and job.ending is None:  # closed: saved; else no learner comes any more
        evaluations.pin_saved(job, task.start.policy_id)


def retry(job: TrainingJob, task: Task, why: str, *, counts: bool, for_good: bool = False) -> None:
    """Try a task again, by this worker or another; a failure too many fails the job.

    Args:
        job: whose task it is.
        task: that was not finished.
        why: what happened.
        counts: whether it is the task's own failure.
        for_good: whether another try would end in the same way.
    """
    lose_grant(job, task)
    if task.kind == "learn":
        job.learner_waits.note("learner", job.now)
    if task.has_result:  # it was lost after it had done its work
        finish(job, task, TaskState.SUCCEEDED)
        return
    is_surplus = task.index >= job.wanted["collector"]
    if task.kind == "collect" and (job.ending is not None or is_surplus):
        finish(job, task, TaskState.CANCELLED)
        return
    task.failures += counts
    if for_good or task.failures > job.limits.max_failures:
        finish(job, task, TaskState.FAILED)
        if task.kind == "evaluate":
            job.note("evaluation", f"{task.task_id} was given up: {why}.")
            if job.ending is not None and task.task_id == job.ending.task_id:
                evaluations.note_failure(job, why)
        else:
            times = "" if for_good else f" {task.failures} times"
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


def restart_learners(job: TrainingJob) -> None:
    """Send learners back to their latest checkpoint."""
    for task in job.tasks.open("learn"):
        worker = job.roster.get(task.worker_id, task.incarnation)
        if job.ending is None and task.state is TaskState.RUNNING and worker is not None:
            job.note("restored", "The learner goes back to its latest checkpoint.")
            retry(job, task, "it was told to go back", counts=False)
            free(job, worker)


def free(job: TrainingJob, worker: KnownWorker) -> None:
    """Make the worker idle, or release it if it leaves."""
    worker.task_id = worker.call = None
    if worker.is_leaving:
        release(job, worker)
    else:
        worker.become(WorkerState.IDLE)
        job.queue_call(worker)


def release(job: TrainingJob, worker: KnownWorker) -> None:
    """Release a worker: the operator ends it for good."""
    worker.become(WorkerState.GONE)
    job.emit(ev.Release(worker.worker_id, worker.incarnation))
    job.emit(ev.Shut(worker.worker_id, worker.incarnation))
    job.note("gone", f"{worker.worker_id} has left.", worker_id=worker.worker_id)


def lose_grant(job: TrainingJob, task: Task) -> None:
    """Count the batches that were out with a learner as lost."""
    if task.batches:
        job.emit(ev.Settle(task.batches, ()))
    job.accounts.lost += task.granted
    task.granted, task.batches, task.drawing = 0, (), None


def return_grant(job: TrainingJob, task: Task) -> None:
    """Take a grant back of which nothing was learned."""
    if not task.batches:
        job.accounts.granted -= task.granted
        task.granted = 0
    lose_grant(job, task)
