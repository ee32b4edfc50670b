"""The state of a job. The functions of this package read and change it. It does no I/O and reads no clock.

`TrainingJob` holds all state. Its docstring lists which modules write which attribute. This file also defines the
classes of some attributes: `Requests`, `OperatorLink`, `LearnerActivity`, `CollectorActivity` and `JobEnding`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from rlframe.coordinator.commander import Commander, View
from rlframe.coordinator.config import Limits
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.records import Accounts, Roster, Task, Tasks, WorkerRecord
from rlframe.coordinator.messages import ROLES, Header, Role, WorkerInfo
from rlframe.coordinator.states import EndingStep, JobState, check, is_over
from rlframe.metrics.rows import ActorCounts, Rows, add_point
from rlframe.stop_conditions import StopReason

_CALLS_PER_START = 2**32  # each start of a coordinator gets a range of this many call numbers


@dataclasses.dataclass
class JobEnding:
    """The ending of a job: its reason, its current step, and the last evaluation. Later reasons are ignored."""

    reason: StopReason
    failed: bool
    evaluates: bool  # if True, evaluate the last version
    since: float  # time at which `step` started
    close_within: float  # seconds that tasks have to close
    step: EndingStep = EndingStep.COLLECTORS
    evaluation: dict[str, Any] | None = None  # result of the last evaluation
    task_id: str | None = None  # task of the last evaluation
    evaluation_error: str | None = None  # if the last evaluation failed: the reason

    def add_problem(self, problem: str) -> None:
        """Append a problem to the text that explains why the job ends."""
        self.reason = self.reason._replace(text=f"{self.reason.text}; but {problem}")

    @property
    def needs_learner(self) -> bool:
        """True if a learner must still save a checkpoint. While this is true, a lost learner is replaced."""
        return self.step in (EndingStep.COLLECTORS, EndingStep.LEARNER) and not self.failed

    def replaces(self, role: Role) -> bool:
        """Return True if a worker of this role must be replaced when it is lost during the ending."""
        if role == "evaluator":
            return self.step is not EndingStep.WORKERS
        return role == "learner" and self.needs_learner

    def closes(self, task: Task) -> bool:
        """Return True if the current step of the ending closes this task."""
        if task.kind == "collect":
            return True
        if task.kind == "learn":
            return self.step is not EndingStep.COLLECTORS
        return task.task_id != self.task_id

    def to_json(self) -> dict[str, Any]:
        """Return the fields to write to the journal, without times: a restarted coordinator starts new deadlines."""
        names = ("reason", "failed", "evaluates", "evaluation", "task_id", "evaluation_error")
        return {**{name: getattr(self, name) for name in names}, "step": self.step.value}


@dataclasses.dataclass
class Requests:
    """The current requests from people and from automatic scaling."""

    wanted: dict[Role, int]  # number of workers of each role
    count_is_manual: bool = False  # True if a person chose the number of collectors
    paused: bool = False  # True while collecting and learning are paused
    save_next_update: bool = False  # True if the learner must save a checkpoint with its next update


@dataclasses.dataclass
class OperatorLink:
    """The connection of this coordinator to the operator."""

    has_answered: bool = False
    problem: str = ""  # why the operator cannot be reached; empty if it can be reached

    @property
    def is_away(self) -> bool:
        """True if the operator cannot be reached, or has not answered yet."""
        return bool(self.problem) or not self.has_answered


class LearnerActivity:
    """The state and the waiting time of the learner.

    Attributes:
        has_started: True once any learner has started. Collectors must wait for this, because no buffer exists before.
        waits_for: "data" if the learner waits for data, "learner" if no learner runs, or None while the learner learns.
        draws_fail_since: Time since which every draw from the replay buffer has failed; None if the last draw worked.
    """

    def __init__(self, now: float) -> None:
        self.has_started = False
        self.waits_for: Literal["data", "learner"] | None = "learner"
        self.draws_fail_since: float | None = None
        self._waited, self._began = 0.0, now

    def wait_for(self, reason: Literal["data", "learner"] | None, now: float) -> None:
        """Set `waits_for`, and record the waiting time until now."""
        if reason != self.waits_for:
            self._waited, self._began, self.waits_for = self.seconds_without_data(now), now, reason

    def seconds_without_data(self, now: float) -> float:
        """Return the total seconds that the learner has waited for data."""
        return self._waited + (now - self._began if self.waits_for == "data" else 0.0)


@dataclasses.dataclass
class CollectorActivity:
    """Total time that all collectors have spent in their calls, and how much of it they waited."""

    seconds: float = 0.0  # total duration of all calls in seconds
    seconds_waited: float = 0.0  # part of `seconds` spent waiting for newer parameters or buffer space


class TrainingJob:
    """The state of one job. Not thread-safe.

    Args:
        commander: Chooses the workers' tasks.
        limits: The deadlines.
        wanted: Number of workers of each role.
        by_key: True if the coordinator draws batches for the learner. Otherwise the learner draws them.
        now: Current time in seconds. It is never lower after a restart of the coordinator.
        evaluates: True to evaluate the last version when the job ends.
        counts_before: Counters from earlier sessions of the run.
        min_version: Newest version of the previous job. Learners publish only higher versions.
        saved: Result of `to_json` from an earlier coordinator of the same job.

    The arguments and `began` (start time of the job) do not change. These modules change the other attributes:

        now                    `machine`: time of the newest event
        state                  `machine`; `begin_ending` and `fail`, which other modules call
        requests               `machine`; `replies`, if a commander's request was carried out; `tasks`: an evaluator
        operator               `machine`
        ending                 `machine`; `replies`, `tasks`: the last evaluation; others start it with `begin_ending`
        roster                 `worker_tracking`: the workers; `next_calls`: their calls and states; `replies`: reports
        tasks                  `next_calls` starts them, `replies` records their results, `tasks` ends them
        learner, collectors    `replies`: activity and waiting times; `worker_tracking` and `tasks` reset them
        accounts, rows         `replies`: the counters; `tasks`: lost batches; `worker_tracking`: lost workers
        effects                `emit`: effects of the newest event
        workers_to_call        `queue_call`: see `machine.advance`
    """

    def __init__(
        self,
        commander: Commander,
        limits: Limits,
        wanted: dict[Role, int],
        *,
        by_key: bool,
        now: float,
        evaluates: bool = True,
        counts_before: ActorCounts | None = None,
        min_version: int = -1,
        saved: dict[str, Any] | None = None,
    ) -> None:
        self.commander, self.limits, self.by_key, self.evaluates = commander, limits, by_key, evaluates
        self.min_version, self.began, self.now = min_version, now, now
        self.state = JobState.INIT
        self.ending: JobEnding | None = None
        self.requests = Requests({role: wanted.get(role, 0) for role in ROLES})
        self.operator = OperatorLink()
        self.roster, self.tasks = Roster(), Tasks()
        self.learner, self.collectors = LearnerActivity(now), CollectorActivity()
        counts = counts_before or ActorCounts()
        self.accounts = Accounts(dict(counts.counters), dict(counts.logged), evaluated_at=counts.env_steps)
        self.rows = Rows(counts.env_steps, self.accounts.total(), self.accounts.total_logged(), now)
        self.effects: list[ev.Effect] = []
        self.workers_to_call: list[WorkerRecord] = []
        self._starts = saved["starts"] + 1 if saved is not None else 0  # number of earlier coordinators of this job
        # Number of the last call. It is greater than all call numbers that earlier coordinators have used.
        self._seq = self._starts * _CALLS_PER_START
        if saved is not None:
            self._restore(saved)

    def to_json(self) -> dict[str, Any]:
        """Return the state that a restarted coordinator needs."""
        return {
            "state": self.state.value,
            "began": self.began,
            "min_version": self.min_version,
            "requests": dataclasses.asdict(self.requests),
            "learner_has_started": self.learner.has_started,
            "starts": self._starts,
            "row": self.rows.to_json(),
            "task_count": self.tasks.count,
            "tasks": [task.to_json() for task in self.tasks],
            "workers": [(each.role, each.index, each.incarnation) for each in self.roster if each.counts_as_wanted],
            "accounts": self.accounts.to_json(),
            "ending": self.ending.to_json() if self.ending is not None else None,
        }

    def _restore(self, saved: dict[str, Any]) -> None:
        state = JobState(saved["state"])
        self.began, self.min_version = saved["began"], saved["min_version"]
        self.requests = Requests(**saved["requests"])
        self.learner.has_started = saved["learner_has_started"]
        step, total, logged = saved["row"]
        self.rows = Rows(step, total, logged, self.now)
        self.accounts = Accounts(**saved["accounts"])
        self.tasks.count = saved["task_count"]
        for role, index, incarnation in saved["workers"]:  # the operator's list will show which of them have ended
            self.roster.add(WorkerInfo(role, index, incarnation), self.now).has_answered = True
        for each in saved["tasks"]:
            task = Task.from_json(each)
            self.accounts.lost += task.granted
            task.granted = 0
            self.tasks.put(task)
        self.state = state if is_over(state) else JobState.INIT
        self.accounts.coordinator_restarts += 1
        if saved["ending"] is not None:
            reason, step = StopReason(*saved["ending"]["reason"]), EndingStep(saved["ending"]["step"])
            ending = {**saved["ending"], "reason": reason, "step": step}
            self.ending = JobEnding(**ending, since=self.now, close_within=self.limits.close_deadline)

    @property
    def view(self) -> View:
        """The progress of the job, for the commander."""
        newest = self.accounts.evaluations[-1] if self.accounts.evaluations else None
        return View(
            env_steps=self.accounts.env_steps,
            learner_steps=self.accounts.learner_steps,
            params_version=self.accounts.params_version,
            seconds=self.now - self.began,
            eval_return=newest[1] if newest else None,
            evaluated_at=self.accounts.evaluated_at,
        )

    @property
    def reason(self) -> str:
        """Why the job ends; empty until the ending starts."""
        return self.ending.reason.text if self.ending is not None else ""

    # --- effects

    def emit(self, effect: ev.Effect) -> None:
        """Add an effect of the current event."""
        self.effects.append(effect)

    def note(self, kind: str, text: str, **fields: Any) -> None:
        """Add a line to the log that people read."""
        self.emit(ev.Note(kind, text, fields))

    def request_workers(self, role: Role, count: int) -> None:
        """Set the wanted number of workers of a role, and request that number from the operator."""
        self.requests.wanted = {**self.requests.wanted, role: count}  # new dict: the journal may still read the old one
        if self.operator.has_answered:
            self.emit(ev.ScaleRole(role, count))

    def queue_call(self, *workers: WorkerRecord) -> None:
        """Queue workers. `machine.advance` chooses their next calls after it has handled the event."""
        self.workers_to_call += workers

    def header(self, worker: WorkerRecord, task: Task) -> Header:
        """Return the header of a new call. Its number is greater than the numbers of all earlier calls."""
        self._seq += 1
        return Header(task.task_id, task.attempt, worker.worker_id, worker.incarnation, self._seq)

    def call(self, worker: WorkerRecord, task: Task, method: str, *args: Any) -> None:
        """Send a new call to a worker, as part of its task."""
        worker.call = ev.Send(worker.key, method, self.header(worker, task), args)
        worker.called_at = self.now
        self.emit(worker.call)

    def call_again(self, worker: WorkerRecord, call: ev.Send, delay: float) -> None:
        """Repeat a call with the same number, after `delay` seconds."""
        if self.now >= worker.called_at:  # if `called_at` is in the future, a repeat is already scheduled
            worker.called_at = self.now + delay
            self.emit(dataclasses.replace(call, delay=delay))

    def write_row(self) -> None:
        """Emit a row of metrics if anything has changed since the last row."""
        accounts = self.accounts
        row = self.rows.next(accounts.env_steps, accounts, self.now)
        if not row:
            return
        if "episode_return" in row:
            add_point(accounts.returns, accounts.env_steps, row["episode_return"])
        row |= {**accounts.logs, "learner_steps": accounts.learner_steps, "params_version": accounts.params_version}
        row["collectors"] = len([worker for worker in self.roster.of("collector") if worker.task_id])
        self.emit(ev.Row(accounts.env_steps, row))

    # --- state

    def become(self, state: JobState) -> None:
        """Change the job's state. Raise `TransitionError` if the transition is not allowed."""
        if state is not self.state:
            check(self.state, state)
            before, self.state = self.state, state
            self.note("job", f"{before.value} → {state.value}", before=before.value, after=state.value)

    def must_close(self, worker: WorkerRecord, task: Task) -> bool:
        """Return True if the worker must close the task.

        It must if the worker is leaving, if the job's ending closes the task, or if the commander now returns a
        different task.
        """
        if self.ending is not None:
            return worker.is_leaving or self.ending.closes(task)
        return worker.is_leaving or (task.kind != "evaluate" and not self._is_still_assigned(worker.role, task))

    def _is_still_assigned(self, role: Role, task: Task) -> bool:
        """Return True if the commander still returns the same task for the task's worker."""
        now, then = self.commander.task(role, task.index, self.view), task.start
        return now is not None and (now.policy_id, now.overrides) == (then.policy_id, then.overrides)

    def begin_ending(self, reason: StopReason, evaluates: bool = False, *, failed: bool = False) -> None:
        """Start to end the job. Do nothing if the ending has already started."""
        if self.ending is None:
            self.ending = JobEnding(reason, failed, evaluates, self.now, self.limits.close_deadline)
            self.become(JobState.DRAINING)
            self.note("draining", f"The job ends: {reason.text}.", failed=failed)
            self.queue_call(*self.roster)

    def fail(self, reason: str) -> None:
        """Let the job fail: start its ending as a failure, or mark an ending that has already started as a failure."""
        self.begin_ending(StopReason("error", reason), failed=True)
        if self.ending is not None and not self.ending.failed:
            self.ending.failed = True
            self.ending.add_problem(reason)
