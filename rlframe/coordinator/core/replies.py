"""Handle the replies of workers: tasks start and close, batches are learned, versions are evaluated.

Each granted batch is counted once: it is pending at its learner, learned, dropped or lost. Each evaluation uses one
version, which stays pinned until the evaluation ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core import tasks, worker_tracking
from rlframe.coordinator.core.job import TrainingJob
from rlframe.coordinator.core.records import Task, WorkerRecord
from rlframe.coordinator.messages import (
    CallRefused,
    Closed,
    Collected,
    Demand,
    Evaluated,
    Failed,
    Learn,
    Learned,
    NotReady,
    Started,
    WorkerReply,
)
from rlframe.coordinator.states import TaskState
from rlframe.metrics.rows import COUNTERS, add_point, evaluation_row

# Seconds between the reply `NotReady` and the next call. The worker has waited up to 0.3 s before this reply.
_REPEAT_AFTER = 0.02
_DEMAND_AGAIN_AFTER = 0.05  # seconds before the next `data_demand` of a learner that can accept no batch
_DRAW_AGAIN_AFTER = 1.0  # seconds before the next `data_demand` after the replay buffer raised


# --- all replies


def on_unanswered(job: TrainingJob, event: ev.Unanswered) -> None:
    """Repeat an unanswered call with the same number. `worker_tracking.check_all` repeats pings."""
    worker = job.roster.get(*event.key)
    if worker is None:
        return
    if event.header is None:
        worker.awaits_ping_reply = worker.awaits_ping_reply and event.method != "ping"
    elif worker.call is not None and worker.call.header == event.header:
        job.call_again(worker, worker.call, job.limits.retry_after)


def on_replied(job: TrainingJob, event: ev.Replied) -> None:
    """Handle a reply to the pending call. Count any other reply as stale."""
    worker = job.roster.get(*event.key)
    if worker is None:
        job.accounts.stale += 1
    elif event.header is None:
        worker_tracking.on_ping_reply(job, worker, event.reply)
    elif worker.call is None or worker.call.header != event.header:
        job.accounts.stale += 1  # does not prove that the worker is alive, because the reply may be old
    elif isinstance(event.reply, CallRefused) and event.reply.is_misdirected:
        worker_tracking.mark_lost(job, worker, worker_tracking.REPLACED)
    else:
        worker_tracking.mark_alive(job, worker)
        _handle(job, worker, worker.call, job.tasks.get(event.header.task_id), event.reply)


def _handle(job: TrainingJob, worker: WorkerRecord, call: ev.Send, task: Task | None, reply: WorkerReply) -> None:
    if task is None or task.is_over:
        worker_tracking.make_idle(job, worker)
        return
    if isinstance(reply, NotReady):
        _on_not_ready(job, worker, task, call, reply)
        return
    worker.call = None
    if isinstance(reply, CallRefused):
        reply = Failed("Refused", f"it refused {call.method}: {reply.why}")
    is_healthy = task.state is TaskState.RUNNING and job.now - task.started_at > job.limits.healthy_after
    if is_healthy and not isinstance(reply, Failed):
        task.failures = 0
    _REPLY_HANDLERS[type(reply)](job, worker, task, reply)
    job.queue_call(worker)


def _on_not_ready(job: TrainingJob, worker: WorkerRecord, task: Task, call: ev.Send, reply: NotReady) -> None:
    waits = reply.waits_for is not None
    if waits:
        if call.method == "learn":
            job.learner.wait_for("data", job.now)
        if _is_preempted(job, worker, task, call):
            if call.method == "learn":
                tasks.return_grant(job, task)
            worker.call = None
            job.queue_call(worker)
            return
    if call.method == "get_data" and task.kind == "collect":
        _record_waiting(job, worker, waits)
    job.call_again(worker, call, _REPEAT_AFTER)


def _is_preempted(job: TrainingJob, worker: WorkerRecord, task: Task, call: ev.Send) -> bool:
    """Return True if a call that waits for data must not be repeated, because another call is more urgent."""
    if call.method == "learn" and not task.batches and tasks.needs_save(job, task):
        return True
    return call.method in ("learn", "get_data") and job.must_close(worker, task)


# --- tasks


def _on_started(job: TrainingJob, worker: WorkerRecord, task: Task, reply: Started) -> None:
    task.become(TaskState.RUNNING)
    task.started_at = job.now
    worker.progress.num_envs = int(reply.info.get("num_envs", 0))
    worker.progress.counts = {}
    worker.progress.rates.add(job.now, worker.progress.env_steps)
    job.note("started", f"{worker.worker_id} has started {task.task_id}.", worker_id=worker.worker_id, **reply.info)
    if task.kind == "learn":
        accounts = job.accounts
        accounts.reach(reply.info.get("learner_steps", accounts.learner_steps), reply.info.get("params_version", -1))
        job.learner.wait_for(None, job.now)
        job.learner.has_started = True
        job.queue_call(*job.roster)  # collectors wait for the learner's start, because the learner creates the buffer


def _on_closed(job: TrainingJob, worker: WorkerRecord, task: Task, reply: Closed) -> None:
    accounts = job.accounts
    if task.kind == "collect" and "env_steps" in reply.result:
        accounts.add(reply.result)
    if task.kind == "learn":
        accounts.reach(
            reply.result.get("learner_steps", accounts.learner_steps), reply.result.get("params_version", -1)
        )
    # An evaluation without a result was closed early.
    is_done = task.kind != "evaluate" or task.has_result
    tasks.finish(job, task, TaskState.SUCCEEDED if is_done else TaskState.CANCELLED)
    # Leave out the Actor's rank and incarnation, because they differ from the worker's index and incarnation.
    fields = {name: value for name, value in reply.result.items() if name not in ("rank", "incarnation")}
    job.note("closed", f"{worker.worker_id} has closed {task.task_id}.", worker_id=worker.worker_id, **fields)
    worker_tracking.make_idle(job, worker)


def _on_failed(job: TrainingJob, worker: WorkerRecord, task: Task, reply: Failed) -> None:
    """Record an exception of a worker, and retry its task on any worker."""
    why = f"{reply.error}: {reply.message}"
    job.note("failed", f"{worker.worker_id}: {why}", worker_id=worker.worker_id, traceback=reply.traceback)
    tasks.retry(job, task, why, counts=True, is_permanent=reply.is_permanent)
    worker_tracking.make_idle(job, worker)


# --- collecting


def _on_collected(job: TrainingJob, worker: WorkerRecord, task: Task, reply: Collected) -> None:
    _record_waiting(job, worker, reply.waits)
    job.accounts.add(reply.stats)
    worker.progress.counts = {name: reply.stats[name] for name in COUNTERS}
    worker.progress.env_steps += reply.length
    worker.progress.rates.add(job.now, worker.progress.env_steps)
    worker.progress.params_version = reply.params_version
    if job.accounts.env_steps >= job.rows.step + job.limits.row_every:
        job.write_row()


def _record_waiting(job: TrainingJob, worker: WorkerRecord, waits: bool) -> None:
    """Record the duration of a call to a collector. If the collector waits, also add it to the waiting time."""
    seconds, worker.progress.is_waiting = max(job.now - worker.called_at, 0.0), waits
    job.collectors.seconds += seconds
    job.collectors.seconds_waited += seconds * waits


# --- learning


def _on_demand(job: TrainingJob, worker: WorkerRecord, task: Task, reply: Demand) -> None:
    """Draw or grant as many batches as the learner requested, up to `Limits.grant`."""
    count = min(reply.batches, job.limits.grant)
    if count <= 0 or job.must_close(worker, task) or job.requests.paused:
        task.retry_at = job.now + _DEMAND_AGAIN_AFTER
    elif job.by_key:
        task.drawing = job.header(worker, task)
        job.emit(ev.DrawBatches(task.drawing, count))
    else:
        _learn(job, worker, task, Learn(count))


def on_batches_drawn(job: TrainingJob, event: ev.BatchesDrawn) -> None:
    """Send the drawn batches to their learner. Count them as lost if the learner can no longer be called."""
    task = job.tasks.get(event.header.task_id)
    worker = job.roster.get(event.header.worker_id, event.header.incarnation)
    is_awaited = task is not None and task.drawing == event.header
    if task is not None and is_awaited:
        task.drawing = None
        task.retry_at = job.now + _DRAW_AGAIN_AFTER if event.why else task.retry_at
    _check_replay(job, event)
    if task is None or not is_awaited or worker is None or not worker.can_be_called:
        job.accounts.granted += len(event.batches)
        job.accounts.lost += len(event.batches)
        if event.batches:
            job.emit(ev.FinishBatches(event.batches, ()))
    elif event.batches:
        task.batches = event.batches
        _learn(job, worker, task, Learn(len(event.batches), event.batches))
    else:
        job.learner.wait_for("data", job.now)
        job.queue_call(worker)


def _check_replay(job: TrainingJob, event: ev.BatchesDrawn) -> None:
    """End the job if all draws from the replay buffer have failed for `Limits.progress_deadline` seconds."""
    deadline = job.limits.progress_deadline
    if not event.why:
        job.learner.draws_fail_since = None
    elif job.learner.draws_fail_since is None:
        job.learner.draws_fail_since = job.now
        job.note("replay", f"Cannot draw batches from the replay buffer; trying again. {event.why}")
    elif job.now - job.learner.draws_fail_since > deadline:
        job.fail(f"no batch could be drawn from the replay buffer for {deadline:g} s: {event.why}")


def _learn(job: TrainingJob, worker: WorkerRecord, task: Task, learn: Learn) -> None:
    learn = dataclasses.replace(learn, save=job.requests.save_next_update)
    job.requests.save_next_update = False
    task.granted = learn.count
    job.accounts.granted += learn.count
    job.call(worker, task, "learn", learn)


def _on_learned(job: TrainingJob, worker: WorkerRecord, task: Task, reply: Learned) -> None:
    accounts = job.accounts
    job.learner.wait_for(None, job.now)
    has_only_saved = not task.granted  # the call was `Learn(0, save=True)`, before an evaluation
    if has_only_saved:
        accounts.reach(reply.learner_steps, reply.params_version)
        tasks.pin_saved_version(job, task.start.policy_id)
        return
    accounts.learn(reply)
    reported = len(reply.updates) + reply.dropped
    if task.batches:
        job.emit(ev.FinishBatches(task.batches, reply.updates, reply.params_version))
        accounts.dropped += task.granted - reported  # the learner did not report these batches, and gets them only once
    else:
        accounts.granted -= task.granted - reported
    task.granted, task.batches = 0, ()


# --- evaluating


def _on_evaluated(job: TrainingJob, worker: WorkerRecord, task: Task, reply: Evaluated) -> None:
    """Record the result of an evaluation. If the evaluator used the wrong version, record a failure."""
    version, wanted = reply.params_version, task.start.options["params_version"]
    if version != wanted:
        _on_failed(job, worker, task, Failed("Mismatch", f"it evaluated version {version}, not {wanted}"))
        return
    add_point(job.accounts.evaluations, job.accounts.env_steps, reply.values["return_mean"], version)
    if job.ending is not None and task.task_id == job.ending.task_id:
        job.ending.evaluation = {**reply.values, "params_version": version}
    text = f"Version {version}: mean return {reply.values['return_mean']:g}"
    job.note("evaluated", text, params_version=version, **evaluation_row(reply.values))
    job.emit(ev.Row(job.accounts.env_steps, evaluation_row(reply.values)))
    task.has_result = True
    task.become(TaskState.CLOSING)


_REPLY_HANDLERS: dict[type[WorkerReply], Callable[[TrainingJob, WorkerRecord, Task, Any], None]] = {
    Failed: _on_failed,
    Started: _on_started,
    Demand: _on_demand,
    Learned: _on_learned,
    Collected: _on_collected,
    Evaluated: _on_evaluated,
    Closed: _on_closed,
}
