"""The state machine of a job: events come in, effects go out, and nothing else happens.

The diagram's order is in `_next_call`; who is alive is the roster's; how a job ends is in `ending`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rlframe.coordinator.commander import Commander, View
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.accounts import COUNTERS, Accounts
from rlframe.coordinator.core.ending import Ending
from rlframe.coordinator.core.limits import Limits
from rlframe.coordinator.core.roster import Call, Roster, Worker
from rlframe.coordinator.core.tasks import Board, Task
from rlframe.coordinator.messages import (
    KINDS,
    ROLES,
    Alive,
    Closed,
    Collected,
    Demand,
    Evaluated,
    Failed,
    GetData,
    Header,
    Learn,
    Learned,
    NotReady,
    Refused,
    Reply,
    Resources,
    Role,
    Started,
    StartTask,
)
from rlframe.coordinator.states import JobState, TaskState, WorkerState, check, is_over

_AGAIN = 0.02  # seconds before a call that was not done is said again; the worker itself waits for some tenths
_LATER = 0.05  # seconds before a learner that can take no batch is asked again
_WAITS_FOR = ("data", "params", "room", "paused")  # for what a worker may wait as long as it takes
_EPOCH = 2**32  # numbers of calls between two starts of a coordinator


class Machine:
    """One job. Not thread-safe.

    Args:
        commander: says what comes next.
        limits: the deadlines.
        wanted: how many workers of each role.
        by_key: whether the learner is told which items to learn from; else it draws them itself.
        now: the time in seconds, which rises across restarts.
        saved: what `to_json` gave, for a coordinator that was restarted.
    """

    def __init__(
        self,
        commander: Commander,
        limits: Limits,
        wanted: dict[Role, int],
        *,
        by_key: bool,
        now: float,
        saved: dict[str, Any] | None = None,
    ) -> None:
        self.commander, self.limits, self.by_key = commander, limits, by_key
        self.state, self.reason = JobState.INIT, ""
        self.wanted: dict[Role, int] = {role: wanted.get(role, 0) for role in ROLES}
        self.manual = False  # whether a person said how many collectors there are
        self.accounts, self.roster, self.tasks = Accounts(), Roster(limits), Board()
        self.ending: Ending | None = None
        self.began = now
        self.operator_problem = ""
        self.learner_waits_for: str | None = "learner"
        self._waited = 0.0  # seconds that the learner waited for data, until it had some
        self.collected_for = self.paced_for = 0.0  # seconds of collectors' calls, and of these such as they waited
        self._wait_began: float | None = None
        self._operator_answered = False
        self._learner_came = False  # so the buffer that collectors write to is there
        self._paused = self._saves = False
        self._false_starts: dict[str, int] = {}
        self._seq = self._epoch = 0
        self._evaluated_at = 0
        self._row_at, self._row_totals, self._row_began = 0, dict.fromkeys(COUNTERS, 0.0), now
        self._now, self._out = now, list[Any]()
        if saved is not None:
            self._restore(saved)

    # --- the two ways in and out

    def handle(self, event: Any, now: float) -> list[Any]:
        """Takes an event (see `events`) and gives the effects that come of it. Once the job is over nothing changes."""
        if is_over(self.state):
            return []
        self._now, self._out = max(now, self._now), []
        getattr(self, f"_on_{type(event).__name__}")(event)
        if self.ending is None and self.state is not JobState.INIT:
            self._check_stop()
        if self.ending is not None and not is_over(self.state):
            self.ending.go_on(self._now)
        self._settle_state()
        return self._out

    def to_json(self) -> dict[str, Any]:
        """All that a restarted coordinator needs to go on."""
        return {
            "state": self.state.value,
            "reason": self.reason,
            "wanted": self.wanted,
            "manual": self.manual,
            "began": self.began,
            "paused": self._paused,
            "learner_came": self._learner_came,
            "evaluated_at": self._evaluated_at,
            "epoch": self._epoch,
            "row": [self._row_at, self._row_totals],
            "task_count": self.tasks.count,
            "tasks": [task.to_json() for task in self.tasks],
            "accounts": self.accounts.to_json(),
            "ending": self.ending.to_json() if self.ending is not None else None,
        }

    def _restore(self, saved: dict[str, Any]) -> None:
        state = JobState(saved["state"])
        self.reason, self.wanted, self.manual = saved["reason"], dict(saved["wanted"]), saved["manual"]
        self.began, self._paused, self._learner_came = saved["began"], saved["paused"], saved["learner_came"]
        self._evaluated_at, self._epoch = saved["evaluated_at"], saved["epoch"] + 1
        self._seq = self._epoch * _EPOCH
        self._row_at, self._row_totals = saved["row"]
        self.accounts = Accounts(**saved["accounts"])
        self.tasks.count = saved["task_count"]
        for each in saved["tasks"]:
            task = Task.from_json(each)
            self.accounts.lost += task.granted
            task.granted = 0
            self.tasks.put(task)
        self.state = state if is_over(state) else JobState.INIT
        self.accounts.coordinator_restarts += 1
        if saved["ending"] is not None and not is_over(state):
            self.ending = Ending.from_json(self, saved["ending"], self._now)

    @property
    def view(self) -> View:
        """How far the job is, for the commander."""
        newest = self.accounts.evaluations[-1] if self.accounts.evaluations else None
        return View(
            env_steps=self.accounts.env_steps,
            learner_steps=self.accounts.learner_steps,
            params_version=self.accounts.params_version,
            seconds=self._now - self.began,
            eval_return=newest[1] if newest else None,
            evaluated_at=self._evaluated_at,
        )

    # --- effects

    def emit(self, effect: Any) -> None:
        """Adds an effect to those that `handle` gives."""
        self._out.append(effect)

    def note(self, kind: str, text: str, **fields: Any) -> None:
        """Adds a line for the log of events."""
        self.emit(ev.Note(kind, text, fields))

    def end(self, failed: bool, reason: str) -> None:
        """Begins the ending; where it goes on already, it ends as a failure if this is one."""
        if self.ending is not None:
            if failed:
                self.ending.fail(reason)
            return
        self.reason = reason
        self.ending = Ending(self, reason, failed=failed, evaluates=False)

    def close(self, failed: bool, reason: str) -> None:
        """The last thing that happens to a job."""
        self._become(JobState.FAILED if failed else JobState.CLOSED)
        self.reason = reason
        self.write_row()
        self.note(self.state.value.lower(), f"The job is over: {reason}.")
        self.emit(ev.Over(failed, reason))

    def _become(self, state: JobState) -> None:
        if state is not self.state:
            check(self.state, state)
            before, self.state = self.state, state
            self.note("job", f"{before.value} → {state.value}", before=before.value, after=state.value)

    # --- the job

    def _on_Submitted(self, event: ev.Submitted) -> None:
        if self.state is JobState.INIT:
            self._become(JobState.CONNECTING)
            self.emit(ev.Connect())
            for task in self.tasks.open("evaluate"):  # after a restart
                if task.has_result:
                    task.become(TaskState.SUCCEEDED)
                    self.unpin(task)
                elif task.start.options["params_version"] < 0:  # which version was kept is not known
                    self.emit(ev.Pin(task.task_id, task.start.policy_id))

    def _on_OperatorAnswered(self, event: ev.OperatorAnswered) -> None:
        if not self._operator_answered or self.operator_problem:
            if self.operator_problem:
                self.note("operator", "The operator answers again.")
            self._operator_answered, self.operator_problem = True, ""
            for role in ROLES:
                self._request(role)
        for seen in event.workers:
            self._see(seen)
        listed = {(seen.worker_id, seen.incarnation) for seen in event.workers}
        for worker in self.roster:
            if not is_over(worker.state) and (worker.worker_id, worker.incarnation) not in listed:
                self._lose(worker, "its process has ended")

    def _on_OperatorFailed(self, event: ev.OperatorFailed) -> None:
        if not self.operator_problem:
            self.note("operator", f"The operator cannot be reached; the workers go on. {event.why}")
        self.operator_problem = event.why or "it does not answer"

    def _on_Paused(self, event: ev.Paused) -> None:
        if not self._paused:
            self._paused = True
            self.note("paused", "Paused.")

    def _on_Resumed(self, event: ev.Resumed) -> None:
        if self._paused:
            self._paused = False
            self.note("resumed", "Resumed.")
            for worker in self.roster:
                worker.progress_at = self._now
                self.drive(worker)

    def _on_Scaled(self, event: ev.Scaled) -> None:
        self.manual = self.manual or (event.role == "collector" and event.by == "request")
        before = self.wanted[event.role]
        if before == event.count or self.ending is not None:
            return
        self.wanted[event.role] = event.count
        self.note(
            "scaled", f"{event.role}s: {before} → {event.count} ({event.by})", role=event.role, wanted=event.count
        )
        self._request(event.role)
        here = [worker for worker in self.roster.of(event.role) if worker.is_here]
        for worker in here[event.count :]:
            self.remove(worker)

    def want(self, role: Role, count: int) -> None:
        """Has at least so many workers of a role."""
        if self.wanted[role] < count:
            self.wanted[role] = count
            self._request(role)

    def _request(self, role: Role) -> None:
        if self._operator_answered:
            self.emit(ev.Request(role, self.wanted[role]))

    def _on_Cancelled(self, event: ev.Cancelled) -> None:
        self.end(False, event.reason)
        assert self.ending is not None
        self.ending.hurry(event.within)

    def _on_EvaluationAsked(self, event: ev.EvaluationAsked) -> None:
        if self.ending is None:
            self.evaluate(self.commander.final_policy())

    def _on_CheckpointAsked(self, event: ev.CheckpointAsked) -> None:
        self._saves = True
        self.emit(ev.SaveReplay())
        self.note("checkpoint", "The learner saves with its next update.")

    def _on_RestoreAsked(self, event: ev.RestoreAsked) -> None:
        for task in self.tasks.open("learn"):
            worker = self.roster.get(task.worker_id, task.incarnation)
            if self.ending is None and task.state is TaskState.RUNNING and worker is not None:
                self.note("restored", "The learner goes back to its latest checkpoint.")
                self._retry(task, "it was told to go back", counts=False)
                worker.call = None
                self._finish_worker(worker)
                self.drive(worker)

    def _on_Disconnected(self, event: ev.Disconnected) -> None:
        if self.ending is not None:
            self.ending.disconnected(event.why)

    def _on_Ticked(self, event: ev.Ticked) -> None:
        for worker in self.roster:
            if is_over(worker.state):
                continue
            task = self.tasks.get(worker.task_id)
            why = self.roster.why_lost(worker, task is not None and task.state is TaskState.ASSIGNED, self._now)
            if why:
                self._lose(worker, why)
                continue
            self._ping_where_due(worker)
            if worker.call is None:
                self.drive(worker)
            elif task is not None and task.state is TaskState.RUNNING:
                is_healthy = self._now - task.started_at > self.limits.healthy_after
                task.failures = 0 if is_healthy else task.failures

    def _check_stop(self) -> None:
        reason = self.commander.stop(self.view)
        if reason is not None:
            self.reason = reason
            self.ending = Ending(self, reason, failed=False, evaluates=True)
            return
        if self.accounts.params_version >= 0 and not self.tasks.open("evaluate"):
            policy_id = self.commander.evaluation(self.view)
            if policy_id is not None:
                self.evaluate(policy_id)

    def _settle_state(self) -> None:
        """What the state of the job is follows from what there is."""
        if self.ending is not None or self.state is JobState.INIT or is_over(self.state):
            return
        learns = any(task.state is TaskState.RUNNING for task in self.tasks.open("learn"))
        if self.state is JobState.CONNECTING:
            if self._operator_answered:
                self._become(JobState.WAITING)
            return
        if self._paused:
            self._become(JobState.PAUSED)
        elif learns:
            self._become(JobState.RUNNING)
        elif self._learner_came:
            if self.state in (JobState.WAITING,):  # after a restart of the coordinator
                self._become(JobState.RUNNING)
            self._become(JobState.DEGRADED)
        elif self.state is JobState.PAUSED:
            self._become(JobState.WAITING)

    # --- workers

    def _see(self, seen: ev.Seen) -> None:
        newest = self.roster.newest(seen.worker_id)
        if newest is not None and newest.incarnation >= seen.incarnation:
            worker = newest
            if newest.incarnation > seen.incarnation or is_over(newest.state):
                return  # it has not gone yet
        else:
            if newest is not None and not is_over(newest.state):
                self._lose(newest, "its process was replaced")
            worker = self.roster.add(seen, self._now)
            here = len([each for each in self.roster.of(worker.role) if each.is_here])
            if here > self.wanted[worker.role] and self.ending is None:
                self.remove(worker)
                return
        if worker.state is WorkerState.REQUESTED and seen.address is not None:
            worker.address, worker.heard_at = seen.address, self._now
            worker.become(WorkerState.CONNECTING)
            self.emit(ev.Open(worker.worker_id, worker.incarnation, seen.address))
            self._ping(worker)

    def _ping_where_due(self, worker: Worker) -> None:
        # One that is out for long is lost: the connection may have been another's.
        every = self.limits.suspect_after if worker.ping_out else self.limits.ping_every
        if worker.state is not WorkerState.REQUESTED and worker.pinged_at + every <= self._now:
            self._ping(worker)
        silent = self._now - worker.heard_at
        task = self.tasks.get(worker.task_id)
        starts = task is not None and task.state is TaskState.ASSIGNED
        can_be = worker.state in (WorkerState.IDLE, WorkerState.BUSY, WorkerState.CLOSING)
        if silent > self.limits.suspect_after and can_be and not starts:
            worker.become(WorkerState.SUSPECT)
            self.note("suspect", f"{worker.worker_id} has not answered for {silent:.0f} s.", worker_id=worker.worker_id)

    def _ping(self, worker: Worker) -> None:
        worker.pinged_at, worker.ping_out = self._now, True
        self.emit(ev.Send(worker.worker_id, worker.incarnation, "ping", None))

    def remove(self, worker: Worker) -> None:
        """Has a worker go, once what it does is closed."""
        worker.leaves = True
        worker.become(WorkerState.DRAINING)
        if self.tasks.get(worker.task_id) is None:
            self._release(worker)
        else:
            self.drive(worker)

    def _release(self, worker: Worker) -> None:
        worker.become(WorkerState.GONE)
        self.emit(ev.Release(worker.worker_id, worker.incarnation))
        self.emit(ev.Shut(worker.worker_id, worker.incarnation))
        self.note("gone", f"{worker.worker_id} has left.", worker_id=worker.worker_id)

    def _lose(self, worker: Worker, why: str) -> None:
        came = worker.state not in (WorkerState.REQUESTED, WorkerState.CONNECTING)
        worker.become(WorkerState.LOST)
        self.emit(ev.Shut(worker.worker_id, worker.incarnation))
        is_replaced = not worker.leaves and (self.ending is None or self.ending.replaces(worker.role))
        if not is_replaced:
            self.emit(ev.Release(worker.worker_id, worker.incarnation))
        else:
            self.accounts.restarts += 1
            self.emit(ev.ReportFailed(worker.worker_id, worker.incarnation))
        self.note(
            "lost",
            f"{worker.worker_id} (incarnation {worker.incarnation}) is lost: {why}.",
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
        )
        task, worker.task_id, worker.call = self.tasks.get(worker.task_id), None, None
        if task is not None and not task.is_over:
            # A collector that ran may be lost as often as its machine likes: others go on.
            self._retry(task, why, counts=task.state is TaskState.ASSIGNED or task.kind != "collect")
        if not came and is_replaced:
            starts = self._false_starts[worker.worker_id] = self._false_starts.get(worker.worker_id, 0) + 1
            if starts > self.limits.max_failures:
                self.end(True, f"{worker.worker_id} did not come up {starts} times in a row: {why}. Look at its output")

    # --- answers

    def _on_Unanswered(self, event: ev.Unanswered) -> None:
        worker = self.roster.get(event.worker_id, event.incarnation)
        if worker is None:
            return
        if event.header is None:
            worker.ping_out = worker.ping_out and event.method != "ping"
        elif worker.call is not None and worker.call.header == event.header:
            self._say_again(worker, worker.call, self.limits.retry_after)

    def _on_Replied(self, event: ev.Replied) -> None:
        worker, reply = self.roster.get(event.worker_id, event.incarnation), event.reply
        if worker is None:
            self.accounts.stale += 1
        elif event.header is None:
            self._hear(worker)
            if isinstance(reply, Alive):
                worker.ping_out = False
                self._alive(worker, reply)
            elif isinstance(reply, Resources):
                worker.host, worker.pid = reply.host, reply.pid
        elif worker.call is None or worker.call.header != event.header:
            self.accounts.stale += 1  # and no sign of life: it may have been on its way for long
        else:
            self._hear(worker)
            self._answered(worker, worker.call, reply)

    def _hear(self, worker: Worker) -> None:
        if self.roster.hear(worker, self._now):
            self.note("back", f"{worker.worker_id} answers again.", worker_id=worker.worker_id)

    def _alive(self, worker: Worker, reply: Alive) -> None:
        if reply.progress != worker.progress:
            worker.progress, worker.progress_at = reply.progress, self._now
        if worker.state is not WorkerState.CONNECTING:
            if worker.call is None:
                self.drive(worker)
            return
        worker.become(WorkerState.IDLE)
        self._false_starts.pop(worker.worker_id, None)
        self.emit(ev.Send(worker.worker_id, worker.incarnation, "resources", None))
        self.note("came", f"{worker.worker_id} (incarnation {worker.incarnation}) is here.", worker_id=worker.worker_id)
        task = self.tasks.get(reply.task_id)
        if (
            task is not None
            and (task.worker_id, task.incarnation) == (worker.worker_id, worker.incarnation)
            and (task.state, task.attempt) == (TaskState.PENDING, reply.attempt)
            and reply.phase in ("running", "waiting")
        ):
            # This coordinator was restarted: the worker has gone on meanwhile.
            task.become(TaskState.ASSIGNED)
            task.become(TaskState.RUNNING)
            task.started_at = self._now
            worker.become(WorkerState.BUSY)
            worker.task_id = task.task_id
            self._learner_came = True
            if task.kind == "learn":
                self._learner_waits(None)
            self.note("adopted", f"{worker.worker_id} is at {task.task_id} still.", worker_id=worker.worker_id)
        self.drive(worker)

    def _answered(self, worker: Worker, call: Call, reply: Reply) -> None:
        task = self.tasks.get(call.header.task_id)
        if task is None or task.is_over:
            worker.call = None
            self._finish_worker(worker)
            return
        if isinstance(reply, NotReady):
            self._not_ready(worker, task, call, reply)
            return
        worker.call, worker.progress_at = None, self._now
        if isinstance(reply, Failed):
            self._failed(worker, task, reply)
            return
        if isinstance(reply, Refused):
            self._failed(worker, task, Failed("Refused", f"it refused {call.method}: {reply.why}"))
            return
        if isinstance(reply, Started):
            self._started(worker, task, reply)
        elif isinstance(reply, Demand):
            self._demanded(worker, task, reply)
        elif isinstance(reply, Learned):
            self._learned(task, reply)
        elif isinstance(reply, Collected):
            self._note_pace(worker, reply.waits)
            self._collected(worker, reply)
        elif isinstance(reply, Evaluated):
            self._evaluated(worker, task, reply)
        elif isinstance(reply, Closed):
            self._closed(worker, task, reply)
        self.drive(worker)

    def _not_ready(self, worker: Worker, task: Task, call: Call, reply: NotReady) -> None:
        if reply.why in _WAITS_FOR:
            worker.progress_at = self._now
            if call.method == "learn":
                self._learner_waits("data")
                if self._is_to_close(worker, task):
                    self._give_back(task)
                    worker.call = None
                    self.drive(worker)
                    return
            if call.method == "get_data" and self._is_to_close(worker, task):
                worker.call = None
                self.drive(worker)
                return
        if call.method == "get_data" and task.kind == "collect":
            self._note_pace(worker, reply.why in _WAITS_FOR)
        self._say_again(worker, call, _AGAIN)

    def _note_pace(self, worker: Worker, waits: bool) -> None:
        """A collector answered: whether it could collect since it was called, or had to wait."""
        seconds, worker.waits = max(self._now - worker.said_at, 0.0), waits
        self.collected_for, self.paced_for = self.collected_for + seconds, self.paced_for + seconds * waits

    def _started(self, worker: Worker, task: Task, reply: Started) -> None:
        task.become(TaskState.RUNNING)
        task.started_at = self._now
        self.note("started", f"{worker.worker_id} is at {task.task_id}.", worker_id=worker.worker_id, **reply.info)
        if task.kind == "learn":
            accounts = self.accounts
            accounts.learner_steps = int(reply.info.get("learner_steps", accounts.learner_steps))
            accounts.params_version = max(accounts.params_version, int(reply.info.get("params_version", -1)))
            self._learner_came = True
            self._learner_waits(None)
            for other in self.roster:  # collectors waited for the buffer to be there
                if other is not worker and other.call is None:
                    self.drive(other)

    def _demanded(self, worker: Worker, task: Task, reply: Demand) -> None:
        count = min(reply.batches, self.limits.grant)
        if count <= 0 or self._is_to_close(worker, task) or self._paused:
            task.again_at = self._now + _LATER
            return
        if self.by_key:
            self._seq += 1
            task.drawing = self._header(worker, task)
            self.emit(ev.Draw(task.drawing, count))
        else:
            self._learn(worker, task, Learn(count))

    def _on_Drawn(self, event: ev.Drawn) -> None:
        task = self.tasks.get(event.header.task_id)
        worker = self.roster.get(event.header.worker_id, event.header.incarnation)
        if task is None or task.drawing != event.header or worker is None or not worker.answers:
            if task is not None and task.drawing == event.header:
                task.drawing = None
            self._lose_batches(len(event.batches))
            if event.batches:
                self.emit(ev.Settle(event.batches, ()))
            return
        task.drawing = None
        if event.batches:
            task.batches = event.batches
            self._learn(worker, task, Learn(len(event.batches), event.batches))
        else:
            self._learner_waits("data")
            self.drive(worker)

    def _lose_batches(self, count: int) -> None:
        self.accounts.granted += count
        self.accounts.lost += count

    def _learn(self, worker: Worker, task: Task, learn: Learn) -> None:
        learn, self._saves = dataclasses.replace(learn, save=self._saves), False
        task.granted = learn.count
        self.accounts.granted += learn.count
        self._call(worker, task, "learn", learn)

    def _learned(self, task: Task, reply: Learned) -> None:
        self._learner_waits(None)
        self.accounts.learn(reply)
        told = len(reply.updates) + reply.dropped
        if task.batches:
            self.emit(ev.Settle(task.batches, reply.updates, reply.params_version))
            self.accounts.dropped += task.granted - told  # a batch that was drawn is not drawn again
        else:
            self.accounts.granted -= task.granted - told
        task.granted, task.batches = 0, ()

    def _give_back(self, task: Task) -> None:
        """Takes a grant back of which nothing was learned."""
        if task.batches:
            self.emit(ev.Settle(task.batches, ()))
            self.accounts.lost += task.granted
        else:
            self.accounts.granted -= task.granted
        task.granted, task.batches = 0, ()

    @property
    def learner_waited(self) -> float:
        """Seconds in all that the learner has waited for data."""
        return self._waited + (self._now - self._wait_began if self._wait_began is not None else 0.0)

    def _learner_waits(self, what: str | None) -> None:
        if what == "data" and self._wait_began is None:
            self._wait_began = self._now
        elif what != "data" and self._wait_began is not None:
            self._waited += self._now - self._wait_began
            self._wait_began = None
        self.learner_waits_for = what

    def _collected(self, worker: Worker, reply: Collected) -> None:
        self.accounts.collect(reply)
        worker.counts = {name: reply.stats[name] for name in COUNTERS}
        worker.params_version = reply.params_version
        if self.accounts.env_steps >= self._row_at + self.limits.row_every:
            self.write_row()

    def write_row(self) -> None:
        """Emits a row of what was done since the last one."""
        totals, before = self.accounts.totals, self._row_totals
        new = {name: totals[name] - before.get(name, 0.0) for name in totals}
        if not new["env_steps"]:
            return
        values: dict[str, Any] = {}
        if new["episodes"]:
            values["episode_return"] = new["return_sum"] / new["episodes"]
            values["episode_length"] = new["length_sum"] / new["episodes"]
            values["episodes"] = int(new["episodes"])
            self.accounts.note_return(values["episode_return"])
        values["steps_per_second"] = new["env_steps"] / max(self._now - self._row_began, 1e-9)
        values.update(self.accounts.logs)
        values["learner_steps"], values["params_version"] = self.accounts.learner_steps, self.accounts.params_version
        values["collectors"] = len([worker for worker in self.roster.of("collector") if worker.task_id])
        self._row_at, self._row_totals, self._row_began = self.accounts.env_steps, totals, self._now
        self.emit(ev.Row(self.accounts.env_steps, values))

    # --- evaluations

    def evaluate(self, policy_id: str) -> Task:
        """Has the newest version of a policy evaluated."""
        self._evaluated_at = self.accounts.env_steps
        self.want("evaluator", 1)
        task = self.tasks.add(StartTask("evaluate", policy_id, {"params_version": -1}))
        self.emit(ev.Pin(task.task_id, policy_id))
        self.note("evaluation", f"The newest version of {policy_id} is to be evaluated ({task.task_id}).")
        return task

    def _on_Pinned(self, event: ev.Pinned) -> None:
        task = self.tasks.get(event.task_id)
        if task is None or task.is_over:
            if event.params_version >= 0:
                self.emit(ev.Unpin(event.policy_id, event.params_version))
            return
        if event.params_version < 0:
            task.become(TaskState.CANCELLED)
            return
        task.start = dataclasses.replace(task.start, options={"params_version": event.params_version})
        for worker in self.roster.of("evaluator"):
            self.drive(worker)

    def _evaluated(self, worker: Worker, task: Task, reply: Evaluated) -> None:
        wanted = task.start.options["params_version"]
        if reply.params_version != wanted:
            self._failed(worker, task, Failed("Mismatch", f"it evaluated version {reply.params_version}, not {wanted}"))
            return
        self.accounts.note_evaluation(reply.values["return_mean"], reply.params_version)
        if self.ending is not None:
            self.ending.evaluated(task, reply)
        text = f"Version {reply.params_version}: mean return {reply.values['return_mean']:g}"
        self.note("evaluated", text, params_version=reply.params_version, **reply.values)
        names = ("return_mean", "return_std", "length_mean", "episodes")
        self.emit(ev.Row(self.accounts.env_steps, {name: reply.values[name] for name in names}))
        task.has_result = True
        task.become(TaskState.CLOSING)

    def unpin(self, task: Task) -> None:
        """Lets go of the version that an evaluation is of."""
        if task.kind == "evaluate" and task.start.options["params_version"] >= 0:
            self.emit(ev.Unpin(task.start.policy_id, task.start.options["params_version"]))

    # --- tasks

    def _closed(self, worker: Worker, task: Task, reply: Closed) -> None:
        if task.kind == "collect" and "env_steps" in reply.result:
            self.accounts.collect(Collected(reply.result, -1))
        if task.kind == "learn":
            self.accounts.learner_steps = int(reply.result.get("learner_steps", self.accounts.learner_steps))
            version = int(reply.result.get("params_version", -1))
            self.accounts.params_version = max(self.accounts.params_version, version)
        # An evaluation without a result was closed early.
        is_done = task.kind != "evaluate" or task.has_result
        task.become(TaskState.SUCCEEDED if is_done else TaskState.CANCELLED)
        self.unpin(task)
        self.note("closed", f"{worker.worker_id} has closed {task.task_id}.", worker_id=worker.worker_id)
        self._finish_worker(worker)

    def _finish_worker(self, worker: Worker) -> None:
        worker.task_id = None
        if worker.leaves:
            self._release(worker)
        else:
            worker.become(WorkerState.IDLE)

    def _failed(self, worker: Worker, task: Task, reply: Failed) -> None:
        why = f"{reply.error}: {reply.message}"
        self.note("failed", f"{worker.worker_id}: {why}", worker_id=worker.worker_id, traceback=reply.traceback)
        self._retry(task, why, counts=True, for_good=reply.for_good)
        worker.call = None
        self._finish_worker(worker)
        self.drive(worker)

    def _retry(self, task: Task, why: str, *, counts: bool, for_good: bool = False) -> None:
        """Has another worker try, or the same one once more; a failure too many fails the job."""
        self._lose_grant(task)
        if task.kind == "learn":
            self._learner_waits("learner")
        if task.has_result:  # it was lost after it had done its work
            task.become(TaskState.SUCCEEDED)
            self.unpin(task)
            return
        if task.kind == "collect" and (self.ending is not None or self._surplus(task)):
            task.become(TaskState.CANCELLED)
            return
        task.failures += counts
        if for_good or task.failures > self.limits.max_failures:
            task.become(TaskState.FAILED)
            self.unpin(task)
            if task.kind == "evaluate" and self.ending is None:
                self.note("evaluation", f"{task.task_id} was given up: {why}.")
            else:
                times = "" if for_good else f" {task.failures} times"
                self.end(True, f"{task.task_id} failed{times}: {why}")
            return
        self.accounts.retries += 1
        task.become(TaskState.RETRYING)
        task.become(TaskState.PENDING)
        for worker in self.roster.of(_role_of(task)):
            if worker.task_id is None:
                self.drive(worker)

    def give_up(self, task: Task) -> None:
        """Cancels a task, whoever is at it."""
        if not task.is_over:
            self._lose_grant(task)
            task.become(TaskState.CANCELLED)
            self.unpin(task)

    def _lose_grant(self, task: Task) -> None:
        """What was out with a learner is lost."""
        if task.batches:
            self.emit(ev.Settle(task.batches, ()))
        self.accounts.lost += task.granted
        task.granted, task.batches, task.drawing = 0, (), None

    def _surplus(self, task: Task) -> bool:
        return task.index >= self.wanted["collector"]

    # --- what comes next

    def drive(self, worker: Worker) -> None:
        """Says to a worker what comes next in the diagram, unless a call is out, or nothing does."""
        if worker.call is not None or not worker.answers:
            return
        task = self.tasks.get(worker.task_id)
        if task is None:
            if not worker.leaves:
                self._assign(worker)
            return
        if task.state is TaskState.ASSIGNED:
            start = task.start
            if task.kind == "learn":
                start = dataclasses.replace(
                    start, options={**start.options, "min_version": self.accounts.params_version}
                )
            self._call(worker, task, "start_task", start)
        elif task.state is TaskState.RUNNING:
            self._next_call(worker, task)
        elif task.state is TaskState.CLOSING:
            self._close_task(worker, task)

    def _next_call(self, worker: Worker, task: Task) -> None:
        if self._is_to_close(worker, task):
            if task.drawing is None:
                task.become(TaskState.CLOSING)
                self._close_task(worker, task)
        elif task.kind == "evaluate":
            self._call(worker, task, "get_data", GetData())
        elif self._paused or self._now < task.again_at or (self.ending is not None and task.kind == "learn"):
            worker.progress_at = self._now
        elif task.kind == "collect":
            self._call(worker, task, "get_data", GetData(seconds=self.limits.slice))
        elif task.drawing is None:
            self._call(worker, task, "data_demand")

    def _is_to_close(self, worker: Worker, task: Task) -> bool:
        if worker.leaves:
            return True
        return self.ending is not None and self.ending.closes(task)

    def _close_task(self, worker: Worker, task: Task) -> None:
        if not worker.leaves:
            worker.become(WorkerState.CLOSING)
        self._call(worker, task, "close_task", self.ending is not None)

    def _assign(self, worker: Worker) -> None:
        task = self._task_for(worker)
        if task is None:
            return
        task.become(TaskState.ASSIGNED)
        task.attempt += 1
        task.worker_id, task.incarnation = worker.worker_id, worker.incarnation
        worker.task_id, worker.progress_at = task.task_id, self._now
        worker.become(WorkerState.BUSY)
        # The number of the attempt is in the journal before anybody hears of it: no two workers ever have the same.
        self.note("assigned", f"{worker.worker_id} is to do {task.task_id}, attempt {task.attempt}.")
        self.drive(worker)

    def _task_for(self, worker: Worker) -> Task | None:
        """A task that waits for such a worker, or a new one that the commander has for it."""
        kind = KINDS[worker.role]
        ends = self.ending is not None
        if kind == "collect" and (ends or self._paused or not self._learner_came):
            return None
        if kind == "learn" and ends and not self.ending.wants_learner:  # type: ignore[union-attr]
            return None
        open_tasks = self.tasks.open(kind)
        for task in open_tasks:
            is_meant = kind != "collect" or task.index == worker.index
            is_known = kind != "evaluate" or task.start.options["params_version"] >= 0
            if kind == "evaluate" and self.ending is not None and self.ending.closes(task):
                continue
            if task.state is TaskState.PENDING and is_meant and is_known:
                return task
        if ends or kind == "evaluate":
            return None
        start = self.commander.task(worker.role, worker.index, self.view)
        if start is None:
            return None
        if kind == "learn" and any(task.start.policy_id == start.policy_id for task in open_tasks):
            return None  # one learner for each policy
        return self.tasks.add(start, worker.index)

    def _header(self, worker: Worker, task: Task) -> Header:
        return Header(task.task_id, task.attempt, worker.worker_id, worker.incarnation, self._seq)

    def _call(self, worker: Worker, task: Task, method: str, *args: Any) -> None:
        self._seq += 1
        worker.call = Call(method, self._header(worker, task), args)
        self._say(worker, worker.call, 0.0)

    def _say(self, worker: Worker, call: Call, delay: float) -> None:
        worker.said_at = self._now + delay
        self.emit(ev.Send(worker.worker_id, worker.incarnation, call.method, call.header, call.args, delay))

    def _say_again(self, worker: Worker, call: Call, delay: float) -> None:
        if self._now >= worker.said_at:  # else an answer came twice, and the call is about to be said already
            self._say(worker, call, delay)


def _role_of(task: Task) -> Role:
    return next(role for role, kind in KINDS.items() if kind == task.kind)
