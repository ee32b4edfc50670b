"""Track the workers of a job: they appear, reply to pings, become silent, and leave.

How a worker ends:

function           state after the call                         when
`drain`            DRAINING; GONE when its task is closed       there are more workers than requested
`make_idle`        IDLE; GONE if it is leaving                  its task was closed or has failed
`mark_lost`        LOST; the operator replaces it               it died, is silent, or was replaced
`disconnect_all`   GONE                                         the job ends
"""

from __future__ import annotations

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.job import TrainingJob
from rlframe.coordinator.core.records import Task, WorkerRecord
from rlframe.coordinator.core.tasks import retry
from rlframe.coordinator.messages import ROLES, Alive, Resources, Role, WorkerInfo, WorkerReply
from rlframe.coordinator.states import TaskState, WorkerState, is_over

_REQUIRED_ROLES: tuple[Role, ...] = ("learner", "collector")  # the job makes no progress without these roles
REPLACED = "its process was replaced"  # why a worker is lost if another process now has its address or index
_CAN_BE_SUSPECT = (WorkerState.IDLE, WorkerState.BUSY, WorkerState.CLOSING)

# --- new workers


def update_from_list(job: TrainingJob, listed: tuple[WorkerInfo, ...]) -> None:
    """Add the workers that are new in the operator's list, and connect to workers that now have an address.

    Mark workers that are missing from the list as lost.
    """
    for info in listed:
        worker = _current_record(job, info)
        is_same = worker.incarnation == info.incarnation  # if False, the list contains an old incarnation
        if is_same and worker.state is WorkerState.REQUESTED and info.address is not None:
            worker.last_reply_at = job.now
            worker.become(WorkerState.CONNECTING)
            job.emit(ev.Connect(worker.key, info.address))
            _ping(job, worker)
    keys = {info.key for info in listed}
    for worker in job.roster:
        if not is_over(worker.state) and worker.key not in keys:
            mark_lost(job, worker, "its process has ended")


def _current_record(job: TrainingJob, info: WorkerInfo) -> WorkerRecord:
    """Return the newest incarnation of a listed worker. Add it if it is new, and drain it if it is not requested."""
    newest = job.roster.newest(info.worker_id)
    if newest is not None and newest.incarnation >= info.incarnation:
        return newest
    if newest is not None and not is_over(newest.state):
        mark_lost(job, newest, REPLACED)
    worker = job.roster.add(info, job.now)
    present = [each for each in job.roster.of(worker.role) if each.counts_as_wanted]
    if len(present) > job.requests.wanted[worker.role] and job.ending is None:
        drain(job, worker)
    return worker


def on_ping_reply(job: TrainingJob, worker: WorkerRecord, reply: WorkerReply) -> None:
    """Handle the reply to `ping` or `resources`, the two calls that do not belong to a task."""
    if isinstance(reply, Alive) and (reply.worker_id, reply.incarnation) != worker.key:
        mark_lost(job, worker, REPLACED)
        return
    mark_alive(job, worker)
    if isinstance(reply, Alive):
        worker.awaits_ping_reply = False
        if worker.state is WorkerState.CONNECTING:
            _on_first_reply(job, worker, reply)
        job.queue_call(worker)
    elif isinstance(reply, Resources):
        worker.host, worker.pid = reply.host, reply.pid


def _on_first_reply(job: TrainingJob, worker: WorkerRecord, reply: Alive) -> None:
    worker.become(WorkerState.IDLE)
    worker.failed_starts, worker.has_answered = 0, True
    job.emit(ev.Send(worker.key, "resources", None))
    text = f"{worker.worker_id} (incarnation {worker.incarnation}) has connected."
    job.note("came", text, worker_id=worker.worker_id)
    task = job.tasks.get(reply.task_id)
    if task is not None and _still_runs(worker, task, reply):
        _adopt(job, worker, task)


def _still_runs(worker: WorkerRecord, task: Task, reply: Alive) -> bool:
    """Return True if the worker still runs the attempt that it had before the coordinator's restart."""
    is_its_own = (task.worker_id, task.incarnation) == worker.key
    is_known = (task.state, task.attempt) == (TaskState.PENDING, reply.attempt)
    return is_its_own and is_known and reply.phase == "running"


def _adopt(job: TrainingJob, worker: WorkerRecord, task: Task) -> None:
    """Continue a task that kept running during the coordinator's restart."""
    task.become(TaskState.ASSIGNED)
    task.become(TaskState.RUNNING)
    task.started_at = job.now
    worker.become(WorkerState.BUSY)
    worker.task_id = task.task_id
    job.learner.has_started = True
    if task.kind == "learn":
        job.learner.wait_for(None, job.now)
    job.note("adopted", f"{worker.worker_id} still runs {task.task_id}.", worker_id=worker.worker_id)


def missing_worker_reason(job: TrainingJob) -> str:
    """Return the reason to fail the job because a required role has had no worker for too long; empty if none.

    The deadline is `Limits.starting_deadline`. Time during which the operator cannot be reached counts only until the
    first learner has started.
    """
    deadline = job.limits.starting_deadline
    for role in _REQUIRED_ROLES:
        since = job.roster.missing_since.setdefault(role, job.now)
        is_here = any(worker.role == role and not is_over(worker.state) for worker in job.roster)
        if is_here or (job.operator.is_away and job.learner.has_started):
            job.roster.missing_since[role] = job.now
        elif job.now - since > deadline and job.operator.is_away:
            why = job.operator.problem or "it does not answer"
            return f"the operator could not be reached for {deadline:g} s: {why}"
        elif job.now - since > deadline:
            return f"the operator has listed no {role} for {deadline:g} s: check that it can start one"
    return ""


# --- checks


def check_all(job: TrainingJob) -> None:
    """Check each worker. If it has been silent for too long, mark it as lost.

    Otherwise, ping it if a ping is due, and queue its next call if no call is pending.
    """
    for worker in job.roster:
        if is_over(worker.state):
            continue
        task = job.tasks.get(worker.task_id)
        starts = task is not None and task.state is TaskState.ASSIGNED
        why = _why_lost(job, worker, starts)
        if why:
            mark_lost(job, worker, why)
            continue
        _ping_if_due(job, worker, starts)
        if worker.call is None:
            job.queue_call(worker)


def _why_lost(job: TrainingJob, worker: WorkerRecord, starts: bool) -> str:
    """Return why the worker counts as lost, or an empty string. `starts` is True while the worker starts a task."""
    limits, silent = job.limits, job.now - worker.last_reply_at
    if worker.state in (WorkerState.REQUESTED, WorkerState.CONNECTING):
        waited = job.now - worker.listed_at
        is_mute = worker.state is WorkerState.CONNECTING and silent > limits.lost_after_starting
        is_late = is_mute or waited > limits.starting_deadline
        return f"it did not start within {waited:.0f} s" if is_late else ""
    is_late = silent > (limits.lost_after_starting if starts else limits.lost_after)
    return f"it has not answered for {silent:.0f} s" if is_late else ""


def _ping_if_due(job: TrainingJob, worker: WorkerRecord, starts: bool) -> None:
    limits = job.limits
    # Repeat a ping that has had no reply for a while, because an earlier process at this address may have received it.
    every = limits.suspect_after if worker.awaits_ping_reply else limits.ping_every
    if worker.state is not WorkerState.REQUESTED and worker.pinged_at + every <= job.now:
        _ping(job, worker)
    silent = job.now - worker.last_reply_at
    if silent > limits.suspect_after and worker.state in _CAN_BE_SUSPECT and not starts:
        worker.become(WorkerState.SUSPECT)
        job.note("suspect", f"{worker.worker_id} has not answered for {silent:.0f} s.", worker_id=worker.worker_id)


def _ping(job: TrainingJob, worker: WorkerRecord) -> None:
    worker.pinged_at, worker.awaits_ping_reply = job.now, True
    job.emit(ev.Send(worker.key, "ping", None))


def mark_alive(job: TrainingJob, worker: WorkerRecord) -> None:
    """Record a reply as a sign of life. This ends the state SUSPECT."""
    worker.last_reply_at = job.now
    if worker.state is WorkerState.SUSPECT:
        worker.become(WorkerState.BUSY if worker.task_id else WorkerState.IDLE)
        job.note("back", f"{worker.worker_id} answers again.", worker_id=worker.worker_id)


# --- leaving workers


def drain(job: TrainingJob, worker: WorkerRecord) -> None:
    """Let a worker close its task, then release it."""
    worker.become(WorkerState.DRAINING)
    if job.tasks.get(worker.task_id) is None:
        _release(job, worker)
    else:
        job.queue_call(worker)


def make_idle(job: TrainingJob, worker: WorkerRecord) -> None:
    """Make the worker idle, or release it if it is leaving."""
    worker.task_id = worker.call = None
    if worker.is_leaving:
        _release(job, worker)
    else:
        worker.become(WorkerState.IDLE)
        job.queue_call(worker)


def _release(job: TrainingJob, worker: WorkerRecord) -> None:
    """Release a worker, so that the operator ends it without a replacement."""
    worker.become(WorkerState.GONE)
    job.emit(ev.Release(worker.key))
    job.emit(ev.Disconnect(worker.key))
    job.note("gone", f"{worker.worker_id} has left.", worker_id=worker.worker_id)


def disconnect_all(job: TrainingJob) -> None:
    """Disconnect from all workers, from learners first. The operator ends the workers after that."""
    for worker in sorted(job.roster, key=lambda one: (ROLES.index(one.role), one.index)):
        if not is_over(worker.state):
            worker.become(WorkerState.GONE)
            worker.task_id = worker.call = None
            job.emit(ev.Disconnect(worker.key))


def mark_lost(job: TrainingJob, worker: WorkerRecord, why: str) -> None:
    """Mark a worker as lost, and retry its task. If it is still needed, request a replacement with the same index."""
    is_replaced = not worker.is_leaving and (job.ending is None or job.ending.replaces(worker.role))
    worker.become(WorkerState.LOST)
    job.emit(ev.Disconnect(worker.key))
    job.accounts.restarts += is_replaced
    job.emit((ev.Replace if is_replaced else ev.Release)(worker.key))
    job.note(
        "lost",
        f"{worker.worker_id} (incarnation {worker.incarnation}) is lost: {why}.",
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
    )
    task, worker.task_id, worker.call = job.tasks.get(worker.task_id), None, None
    if task is not None and not task.is_over:
        job.accounts.discarded += worker.progress.num_envs
        # The loss of a running collector does not count as a failure, because the other collectors continue.
        counts = task.state is TaskState.ASSIGNED or task.kind != "collect"
        retry(job, task, why, counts=counts)
    if not worker.has_answered and is_replaced:
        worker.failed_starts += 1
        if worker.failed_starts > job.limits.max_failures and _is_needed(job, worker):
            times = f"{worker.worker_id} failed to start {worker.failed_starts} times in a row"
            job.fail(f"{times}: {why}. Check its output")


def _is_needed(job: TrainingJob, worker: WorkerRecord) -> bool:
    """Return True if the job cannot continue without a worker: no other learner or collector has started.

    An evaluator is never needed, because the policy is saved.
    """
    others = (other for other in job.roster if other.role == worker.role and other is not worker)
    return worker.role != "evaluator" and not any(each.has_answered and not is_over(each.state) for each in others)
