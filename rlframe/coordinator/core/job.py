"""The state of a job, which the functions of this package read and change. It does no I/O, and has no clock.

`TrainingJob` is the whole; its docstring says which module writes each part. The parts of this file are `Requests`,
`OperatorLink`, `LearnerActivity`, `CollectorActivity` and `JobEnding`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from rlframe.coordinator.commander import Commander, View
from rlframe.coordinator.config import Limits
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.accounts import Accounts
from rlframe.coordinator.core.records import Roster, Task, Tasks, WorkerRecord
from rlframe.coordinator.messages import ROLES, Header, Role, WorkerInfo
from rlframe.coordinator.states import EndingStep, JobState, check, is_over
from rlframe.metrics.rows import ActorCounts, Rows, add_point
from rlframe.stop_conditions import StopReason

_CALLS_PER_START = 2**32  # numbers of calls between two starts of a coordinator


@dataclasses.dataclass
class JobEnding:
    """How a job ends, and how far it has come. The first reason to end stays the job's reason."""

    reason: StopReason
    failed: bool
    evaluates: bool  # the last version
    since: float  # when `step` began
    close_within: float  # seconds that tasks have to close
    step: EndingStep = EndingStep.COLLECTORS
    evaluation: dict[str, Any] | None = None  # what the evaluation of the last version gave
    task_id: str | None = None  # of that
    evaluation_error: str | None = None  # why that failed

    def add_problem(self, problem: str) -> None:
        """Add a problem to the reason."""
        self.reason = self.reason._replace(text=f"{self.reason.text}; but {problem}")

    @property
    def needs_learner(self) -> bool:
        """Return True if a learner must still save: a lost learner is started again then."""
        return self.step in (EndingStep.COLLECTORS, EndingStep.LEARNER) and not self.failed

    def replaces(self, role: Role) -> bool:
        """Return True if a worker of this role is replaced when it is lost now."""
        if role == "evaluator":
            return self.step is not EndingStep.WORKERS
        return role == "learner" and self.needs_learner

    def closes(self, task: Task) -> bool:
        """Return True if the step that the ending is at closes this task."""
        if task.kind == "collect":
            return True
        if task.kind == "learn":
            return self.step is not EndingStep.COLLECTORS
        return task.task_id != self.task_id

    def to_json(self) -> dict[str, Any]:
        """Return the state for the journal. Deadlines start again with the next coordinator."""
        names = ("reason", "failed", "evaluates", "evaluation", "task_id", "evaluation_error")
        return {**{name: getattr(self, name) for name in names}, "step": self.step.value}


@dataclasses.dataclass
class Requests:
    """Requests of people and of the scaling that the job has yet to meet."""

    wanted: dict[Role, int]  # workers of each role
    count_is_manual: bool = False  # a person chose the number of collectors
    paused: bool = False  # collecting and learning
    save_next_update: bool = False  # the learner saves a checkpoint with its next update


@dataclasses.dataclass
class OperatorLink:
    """The connection of this coordinator to the operator."""

    has_answered: bool = False
    problem: str = ""  # why it cannot be reached; empty if it can, or was not tried yet

    @property
    def is_away(self) -> bool:
        """True if it cannot be reached, or has not answered yet."""
        return bool(self.problem) or not self.has_answered


class LearnerActivity:
    """Facts about the learner: whether it has started, and what it waits for.

    Attributes:
        has_started: whether any learner has started, so that collectors find their buffer.
        waits_for: "learner": there is none.
        draws_fail_since: when the replay buffer began to raise with every draw; None: it does not raise.
    """

    def __init__(self, now: float) -> None:
        self.has_started = False
        self.waits_for: Literal["data", "learner"] | None = "learner"
        self.draws_fail_since: float | None = None
        self._waited, self._began = 0.0, now

    def wait_for(self, what: Literal["data", "learner"] | None, now: float) -> None:
        """Note that it waits for this from now on. None: it learns."""
        if what != self.waits_for:
            self._waited, self._began, self.waits_for = self.seconds_without_data(now), now, what

    def seconds_without_data(self, now: float) -> float:
        """Return the seconds in which it has waited for data."""
        return self._waited + (now - self._began if self.waits_for == "data" else 0.0)


@dataclasses.dataclass
class CollectorActivity:
    """The time of all collectors together."""

    seconds: float = 0.0  # in calls
    seconds_waited: float = 0.0  # of these: for newer parameters, or for room


class TrainingJob:
    """The state of one job. Not thread-safe.

    Args:
        commander: decides the workers' tasks.
        limits: the deadlines.
        wanted: how many workers of each role.
        by_key: whether the coordinator draws batches for the learner; else the learner draws them itself.
        now: the time in seconds, which rises across restarts.
        evaluates: whether the last version is evaluated.
        counts_before: what was collected before the job.
        min_version: learners publish above it: the newest version of the job before.
        saved: the result of `to_json`, in a restarted coordinator.

    The arguments stay as they are, and so does `began`, when the job began. The rest changes, in these modules:

        now                    `machine`: when the newest event happened
        state                  `machine`
        requests, operator     `machine`
        ending                 `machine`; others begin it by `begin_ending` and `fail`
        roster                 `worker_tracking`: the workers; `next_calls` their calls, `answers` their reports
        tasks                  `next_calls` begins them, `answers` has their results, `tasks` ends them
        learner, collectors    `answers`: what they have done, and what they wait for
        accounts, rows         `answers`: the counters; `tasks` counts what is lost
        effects                `emit`: those of the newest event
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
        self.effects: list[Any] = []
        self.workers_to_call: list[WorkerRecord] = []
        self._starts = saved["starts"] + 1 if saved is not None else 0  # of a coordinator, before this one
        # The number of the last call. Calls of a coordinator that was killed have numbers below it.
        self._seq = self._starts * _CALLS_PER_START
        if saved is not None:
            self._restore(saved)

    def to_json(self) -> dict[str, Any]:
        """Return the state from which a restarted coordinator continues."""
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
        for role, index, incarnation in saved["workers"]:  # some may have ended while no coordinator ran
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
        """Why the job ends; empty while it does not."""
        return self.ending.reason.text if self.ending is not None else ""

    # --- effects

    def emit(self, effect: Any) -> None:
        """Add an effect to those of the event."""
        self.effects.append(effect)

    def note(self, kind: str, text: str, **fields: Any) -> None:
        """Add a line to the log of events."""
        self.emit(ev.Note(kind, text, fields))

    def request_workers(self, role: Role, count: int) -> None:
        """Ask for so many workers of a role."""
        self.requests.wanted = {**self.requests.wanted, role: count}  # the journal may have the old one
        if self.operator.has_answered:
            self.emit(ev.ScaleRole(role, count))

    def queue_call(self, *workers: WorkerRecord) -> None:
        """Choose the next call of these workers at the end of the event."""
        self.workers_to_call += workers

    def header(self, worker: WorkerRecord, task: Task) -> Header:
        """Make the header of the next call: its number is above all before."""
        self._seq += 1
        return Header(task.task_id, task.attempt, worker.worker_id, worker.incarnation, self._seq)

    def call(self, worker: WorkerRecord, task: Task, method: str, *args: Any) -> None:
        """Call a worker."""
        worker.call = ev.Send(*worker.key, method, self.header(worker, task), args)
        worker.called_at = self.now
        self.emit(worker.call)

    def call_again(self, worker: WorkerRecord, call: ev.Send, delay: float) -> None:
        """Repeat a call, with the same number, after so many seconds."""
        if self.now >= worker.called_at:  # else an answer came twice, and the call is about to be repeated already
            worker.called_at = self.now + delay
            self.emit(dataclasses.replace(call, delay=delay))

    def write_row(self) -> None:
        """Emit a row of the changes since the last row, if there are any."""
        accounts = self.accounts
        row = self.rows.next(accounts.env_steps, accounts, self.now)
        if not row:
            return
        if "episode_return" in row:
            add_point(accounts.returns, accounts.env_steps, row["episode_return"])
        row |= {**accounts.logs, "learner_steps": accounts.learner_steps, "params_version": accounts.params_version}
        row["collectors"] = len([worker for worker in self.roster.of("collector") if worker.task_id])
        self.emit(ev.Row(accounts.env_steps, row))

    # --- its state

    def become(self, state: JobState) -> None:
        """Change its state. Raises TransitionError where that cannot be."""
        if state is not self.state:
            check(self.state, state)
            before, self.state = self.state, state
            self.note("job", f"{before.value} → {state.value}", before=before.value, after=state.value)

    def must_close(self, worker: WorkerRecord, task: Task) -> bool:
        """Return True if the worker must close the task as soon as it can.

        It leaves, the job ends, or the commander, which is asked again, has another task for it by now.
        """
        if self.ending is not None:
            return worker.is_leaving or self.ending.closes(task)
        return worker.is_leaving or (task.kind != "evaluate" and not self._is_still_assigned(worker.role, task))

    def _is_still_assigned(self, role: Role, task: Task) -> bool:
        """Return True if the commander still gives the task's worker the same task."""
        now, then = self.commander.task(role, task.index, self.view), task.start
        return now is not None and (now.policy_id, now.overrides) == (then.policy_id, then.overrides)

    def begin_ending(self, reason: StopReason, evaluates: bool = False, *, failed: bool = False) -> None:
        """Begin the ending. An ending under way is not changed."""
        if self.ending is None:
            self.ending = JobEnding(reason, failed, evaluates, self.now, self.limits.close_deadline)
            self.become(JobState.DRAINING)
            self.note("draining", f"The job ends: {reason.text}.", failed=failed)
            self.queue_call(*self.roster)

    def fail(self, reason: str) -> None:
        """Begin the ending of a failed job. An ending under way becomes a failure; the first failure is kept."""
        self.begin_ending(StopReason("error", reason), failed=True)
        if self.ending is not None and not self.ending.failed:
            self.ending.failed = True
            self.ending.add_problem(reason)
