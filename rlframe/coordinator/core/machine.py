"""The state machine of a job. `advance` is its only entry point.

This file handles the job's state, its ending, and the requests of people.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core import next_calls, replies, tasks, worker_tracking
from rlframe.coordinator.core.job import JobEnding, OperatorLink, TrainingJob
from rlframe.coordinator.core.records import Task
from rlframe.coordinator.messages import ROLES
from rlframe.coordinator.states import EndingStep, JobState, TaskState, WorkerState, is_over


def advance(job: TrainingJob, event: ev.Event, now: float) -> list[ev.Effect]:
    """Change the job according to an event (see `events`). Return the effects. A job that is over does not change."""
    if is_over(job.state):
        return []
    job.now, job.effects = max(now, job.now), []
    _EVENT_HANDLERS[type(event)](job, event)
    if job.ending is None and job.state is not JobState.INIT:
        _check_stop(job)
    if job.ending is not None and not is_over(job.state):
        _advance_ending(job, job.ending)
    to_call, job.workers_to_call = job.workers_to_call, []
    for worker in to_call:
        next_calls.call_next(job, worker)
    _derive_state(job)
    return job.effects


# --- the state of the job


def _check_stop(job: TrainingJob) -> None:
    """Start the ending or an evaluation if the commander requests it."""
    view = job.view
    reason = job.commander.stop(view)
    if reason is not None:
        job.begin_ending(reason, evaluates=job.evaluates)
    elif job.accounts.params_version >= 0 and not job.tasks.open("evaluate"):
        policy_id = job.commander.evaluation(view)
        if policy_id is not None:
            tasks.evaluate(job, policy_id)


def _derive_state(job: TrainingJob) -> None:
    """Derive the job's state from the operator, the requests and the learners' tasks."""
    if job.ending is not None or job.state is JobState.INIT or is_over(job.state):
        return
    if job.state is JobState.CONNECTING:
        if job.operator.has_answered:
            job.become(JobState.WAITING)
    elif job.requests.paused:
        job.become(JobState.PAUSED)
    elif any(task.state is TaskState.RUNNING for task in job.tasks.open("learn")):
        job.become(JobState.RUNNING)
    elif job.learner.has_started:
        # WAITING cannot become DEGRADED directly. This happens after a restart of the coordinator.
        if job.state is JobState.WAITING:
            job.become(JobState.RUNNING)
        job.become(JobState.DEGRADED)
    elif job.state is JobState.PAUSED:
        job.become(JobState.WAITING)


# --- the ending


def _advance_ending(job: TrainingJob, ending: JobEnding) -> None:
    """Start the next step of the ending when the current step is done. Repeat this until a step is not done."""
    if job.state is JobState.CONNECTING:  # the coordinator was restarted during the ending
        job.become(JobState.DRAINING)
        _begin_step(job, ending)
    steps = list(EndingStep)
    while ending.step is not EndingStep.WORKERS and _is_step_done(job, ending):
        ending.step = steps[steps.index(ending.step) + 1]
        ending.since = job.now
        _begin_step(job, ending)
    deadline = job.limits.close_deadline
    if ending.step is EndingStep.WORKERS and job.now - ending.since > deadline:
        _on_workers_ended(job, ev.WorkersEnded(f"it did not answer within {deadline:g} s"))


def _begin_step(job: TrainingJob, ending: JobEnding) -> None:
    """Start a step of the ending. In the steps COLLECTORS and LEARNER, `next_calls` closes the tasks."""
    is_evaluated = ending.evaluates and not ending.failed and job.accounts.params_version >= 0
    if ending.step is EndingStep.EVALUATION:
        job.write_row()  # write it now, so that its rates exclude the time of the evaluation
        if is_evaluated and job.tasks.get(ending.task_id) is None:
            ending.task_id = tasks.evaluate(job, job.commander.final_policy()).task_id
    elif ending.step is EndingStep.WORKERS:
        for task in job.tasks:
            tasks.cancel(job, task)
        worker_tracking.disconnect_all(job)
        job.emit(ev.EndWorkers())
    job.queue_call(*job.roster)


def _is_step_done(job: TrainingJob, ending: JobEnding) -> bool:
    """Return True if the step is done or has exceeded its deadline. After the deadline, cancel the step's tasks."""
    waited = job.now - ending.since
    if ending.step is EndingStep.EVALUATION:
        return _is_evaluated(job, ending, waited)
    left = job.tasks.open("collect" if ending.step is EndingStep.COLLECTORS else "learn")
    if ending.step is EndingStep.COLLECTORS or not ending.needs_learner or not job.learner.has_started:
        left = [task for task in left if task.is_live or _may_be_running(job, task)]
    if not left:
        return True
    if waited <= ending.close_within:
        return False
    overdue = f"{', '.join(task.task_id for task in left)} did not close within {ending.close_within:g} s"
    job.note("overdue", f"{overdue}.")
    if ending.step is EndingStep.LEARNER and job.learner.has_started:
        job.fail(overdue)
    for task in left:
        tasks.cancel(job, task)
    return True


def _may_be_running(job: TrainingJob, task: Task) -> bool:
    """Return True if the task may still run on a worker that has not replied to this restarted coordinator yet."""
    worker = job.roster.get(task.worker_id, task.incarnation)
    if task.attempt < 0:
        return False
    if worker is None:
        return not job.operator.has_answered
    return worker.state in (WorkerState.REQUESTED, WorkerState.CONNECTING)


def _is_evaluated(job: TrainingJob, ending: JobEnding, waited: float) -> bool:
    task, deadline = job.tasks.get(ending.task_id), job.limits.evaluation_deadline
    if task is None or not ending.evaluates or ending.failed:
        return True
    if task.is_over:
        if task.state is not TaskState.SUCCEEDED:
            tasks.note_failure(job, f"{task.task_id} was cancelled")
        return True
    if waited > deadline:
        tasks.note_failure(job, f"it was not done within {deadline:g} s")
        return True
    return False


def _on_workers_ended(job: TrainingJob, event: ev.WorkersEnded) -> None:
    ending = job.ending
    if ending is None:
        return
    if event.why:
        job.note("operator", f"The operator could not end all workers: {event.why}.")
    job.become(JobState.FAILED if ending.failed else JobState.CLOSED)
    job.write_row()
    job.note(job.state.value.lower(), f"The job is over: {job.reason}.")
    job.emit(ev.Over(ending.failed, job.reason))


# --- events from the operator and the clock


def _on_submitted(job: TrainingJob, event: ev.Submitted) -> None:
    if job.state is JobState.INIT:
        job.become(JobState.CONNECTING)
        _resume_evaluations(job)


def _resume_evaluations(job: TrainingJob) -> None:
    """Continue the evaluations that an earlier coordinator has not finished."""
    for task in job.tasks.open("evaluate"):
        if task.has_result:
            tasks.finish(job, task, TaskState.SUCCEEDED)
        elif not tasks.has_version(task):  # the journal may lack a version that was pinned
            tasks.choose_version(job, task)


def _on_operator_answered(job: TrainingJob, event: ev.OperatorAnswered) -> None:
    if job.ending is not None and job.ending.step is EndingStep.WORKERS:
        return  # ignore the list of workers, because all workers are being ended
    if job.operator.is_away:
        if job.operator.problem:
            job.note("operator", "The operator answers again.")
        job.operator = OperatorLink(has_answered=True)
        for role in ROLES:
            job.request_workers(role, job.requests.wanted[role])
    worker_tracking.update_from_list(job, event.workers)


def _on_operator_failed(job: TrainingJob, event: ev.OperatorFailed) -> None:
    if event.is_permanent:
        job.fail(f"the operator raised {event.why}")
        return
    if not job.operator.problem:
        job.note("operator", f"The operator cannot be reached. The workers continue. {event.why}")
    job.operator.problem = event.why or "it does not answer"


def _on_ticked(job: TrainingJob, event: ev.Ticked) -> None:
    worker_tracking.check_all(job)
    tasks.end_overdue_saves(job)
    why = worker_tracking.missing_worker_reason(job)
    if why and job.ending is None:
        job.fail(why)


# --- requests


def _on_scale_requested(job: TrainingJob, event: ev.ScaleRequested) -> None:
    job.requests.count_is_manual |= event.role == "collector" and event.by == "request"
    before = job.requests.wanted[event.role]
    if before == event.count or job.ending is not None:
        return
    text = f"{event.role}s: {before} → {event.count} ({event.by})"
    job.note("scaled", text, role=event.role, wanted=event.count)
    job.request_workers(event.role, event.count)
    here = [worker for worker in job.roster.of(event.role) if worker.counts_as_wanted]
    for worker in here[event.count :]:
        worker_tracking.drain(job, worker)


def _on_pause_requested(job: TrainingJob, event: ev.PauseRequested) -> None:
    if job.requests.paused != event.paused:
        job.requests.paused = event.paused
        kind = "paused" if job.requests.paused else "resumed"
        job.note(kind, f"{kind.capitalize()}.")
        job.queue_call(*job.roster)


def _on_end_requested(job: TrainingJob, event: ev.EndRequested) -> None:
    job.begin_ending(event.reason, evaluates=event.evaluates and job.evaluates)
    if job.ending is not None:
        if job.ending.evaluates and not event.evaluates:  # skip the last evaluation that an earlier request asked for
            job.ending.evaluates, job.ending.reason = False, job.ending.reason._replace(by=event.reason.by)
        job.ending.close_within = event.within or job.ending.close_within


def _on_evaluation_requested(job: TrainingJob, event: ev.EvaluationRequested) -> None:
    if job.ending is None and not job.tasks.open("evaluate"):
        tasks.evaluate(job, job.commander.final_policy())


def _on_checkpoint_requested(job: TrainingJob, event: ev.CheckpointRequested) -> None:
    job.requests.save_next_update = True
    job.emit(ev.SaveReplay())
    job.note("checkpoint", "The learner will save a checkpoint with its next update.")


def _on_restore_requested(job: TrainingJob, event: ev.RestoreRequested) -> None:
    for task in job.tasks.open("learn"):
        worker = job.roster.get(task.worker_id, task.incarnation)
        if job.ending is None and task.state is TaskState.RUNNING and worker is not None:
            job.note("restored", "The learner restarts from its latest checkpoint.")
            tasks.retry(job, task, "a restore was requested", counts=False)
            worker_tracking.make_idle(job, worker)


_EVENT_HANDLERS: dict[type[ev.Event], Callable[[TrainingJob, Any], None]] = {
    ev.Submitted: _on_submitted,
    ev.OperatorAnswered: _on_operator_answered,
    ev.OperatorFailed: _on_operator_failed,
    ev.Replied: replies.on_replied,
    ev.Unanswered: replies.on_unanswered,
    ev.BatchesDrawn: replies.on_batches_drawn,
    ev.Pinned: tasks.on_pinned,
    ev.ScaleRequested: _on_scale_requested,
    ev.PauseRequested: _on_pause_requested,
    ev.EndRequested: _on_end_requested,
    ev.EvaluationRequested: _on_evaluation_requested,
    ev.CheckpointRequested: _on_checkpoint_requested,
    ev.RestoreRequested: _on_restore_requested,
    ev.WorkersEnded: _on_workers_ended,
    ev.Ticked: _on_ticked,
}
