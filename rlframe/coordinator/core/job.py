"""The state of a job, which the functions of this package read and change. It does no I/O, and has no clock."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlframe.coordinator.commander import Commander, View
from rlframe.coordinator.config import Limits
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.accounts import Accounts
from rlframe.coordinator.core.records import KnownWorker, Roster, Task, Tasks
from rlframe.coordinator.messages import ROLES, Header, Role, WorkerInfo
from rlframe.coordinator.states import EndingStep, JobState, check, is_over
from rlframe.metrics.rows import ActorCounts, Rows, add_point

_SAVED = ("reason", "count_is_manual", "began", "paused", "learner_has_started", "min_version", "evaluated_at")
_CALLS_PER_START = 2**32  # numbers of calls between two starts of a coordinator


@dataclasses.dataclass
class JobEnding:
    """How a job ends, and how far it has come. The first reason to end stays the job's reason."""

    failed: bool
    evaluates: bool  # the last version
    since: float  # when `step` began
    close_within: float  # seconds that tasks have to close
    stopped_by: str = ""  # the name of the condition that began it, as `Result.stopped_by`
    step: EndingStep = EndingStep.COLLECTORS
    evaluation: dict[str, Any] | None = None  # what the evaluation of the last version gave
    task_id: str | None = None  # of that
    evaluation_error: str | None = None  # why that failed

    @property
    def wants_learner(self) -> bool:
        """Return True if a learner must still save: a lost learner is started again then."""
        return self.step in (EndingStep.COLLECTORS, EndingStep.LEARNER) and not self.failed

    def replaces(self, role: Role) -> bool:
        """Return True if a worker of this role is replaced when it is lost now."""
        if role == "evaluator":
            return self.step is not EndingStep.DISCONNECT
        return role == "learner" and self.wants_learner

    def closes(self, task: Task) -> bool:
        """Return True if the step that the ending is at closes this task."""
        if task.kind == "collect":
            return True
        if task.kind == "learn":
            return self.step is not EndingStep.COLLECTORS
        return task.task_id != self.task_id

    def to_json(self) -> dict[str, Any]:
        """Return the state for the journal. Deadlines start again with the next coordinator."""
        names = ("failed", "evaluates", "stopped_by", "evaluation", "task_id", "evaluation_error")
        return {**{name: getattr(self, name) for name in names}, "step": self.step.value}


class LearnerWaits:
    """The reason why the learner does not learn, and the time that it has waited for data.

    Attributes:
        what: "data", "learner" (there is none), or None.
    """

    def __init__(self, now: float) -> None:
        self.what: str | None = "learner"
        self._waited, self._began = 0.0, now

    def note(self, what: str | None, now: float) -> None:
        """Note that it waits for this from now on."""
        if what != self.what:
            self._waited, self._began, self.what = self.seconds(now), now, what

    def seconds(self, now: float) -> float:
        """Return the seconds in which it has waited for data."""
        return self._waited + (now - self._began if self.what == "data" else 0.0)


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
        saved: the result of `to_json`, in a restarted coordinator.

    Attributes:
        now: when the newest event happened.
        effects: those of the newest event.
        workers_to_call: workers that may need another call: see `machine.advance`.
        count_is_manual: whether a person chose the number of collectors.
        min_version: learners publish above it: the newest version of the job before.
        paused: whether collecting and learning pause.
        save_next_update: whether the learner saves a checkpoint with its next update.
        operator_answered: whether the operator has answered this coordinator.
        operator_problem: why the operator cannot be reached; empty if it can.
        learner_has_started: whether any learner has started, so that collectors find their buffer.
        draw_fails_since: when the replay buffer began to raise with every draw; None: it does not raise.
        evaluated_at: environment steps at which the newest evaluation was begun.
        collect_seconds: in calls of collectors.
        paced_seconds: of these, seconds in which collectors waited for newer parameters, or for room.
        lacks_since: when a role without which there is no progress was seen last, or the operator could not say.
        ending: how the job ends, once it does.
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
        saved: dict[str, Any] | None = None,
    ) -> None:
        self.commander, self.limits, self.by_key, self.now, self.began = commander, limits, by_key, now, now
        self.state, self.reason, self.evaluates = JobState.INIT, "", evaluates
        self.wanted: dict[Role, int] = {role: wanted.get(role, 0) for role in ROLES}
        self.count_is_manual = self.paused = self.save_next_update = False
        self.operator_answered, self.operator_problem = False, ""
        self.learner_has_started, self.min_version = False, -1
        self.draw_fails_since: float | None = None
        self.collect_seconds = self.paced_seconds = 0.0
        self.lacks_since: dict[Role, float] = {}
        self.ending: JobEnding | None = None
        counts = counts_before or ActorCounts()
        self.accounts = Accounts(dict(counts.counters), dict(counts.logged))
        self.evaluated_at = self.accounts.env_steps
        self.rows = Rows(self.evaluated_at, self.accounts.total(), self.accounts.total_logged(), now)
        self.roster, self.tasks = Roster(), Tasks()
        self.learner_waits = LearnerWaits(now)
        self.effects: list[Any] = []
        self.workers_to_call: list[KnownWorker] = []
        self._starts = saved["starts"] + 1 if saved is not None else 0  # of a coordinator, before this one
        # The number of the last call. Calls of a coordinator that was killed have numbers below it.
        self._seq = self._starts * _CALLS_PER_START
        if saved is not None:
            self._restore(saved)

    def to_json(self) -> dict[str, Any]:
        """Return the state from which a restarted coordinator continues."""
        return {
            **{name: getattr(self, name) for name in _SAVED},
            "state": self.state.value,
            "wanted": dict(self.wanted),
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
        for name in _SAVED:
            setattr(self, name, saved[name])
        self.wanted = dict(saved["wanted"])
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
            ending = {**saved["ending"], "step": EndingStep(saved["ending"]["step"])}
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
            evaluated_at=self.evaluated_at,
        )

    # --- effects

    def emit(self, effect: Any) -> None:
        """Add an effect to those of the event."""
        self.effects.append(effect)

    def note(self, kind: str, text: str, **fields: Any) -> None:
        """Add a line to the log of events."""
        self.emit(ev.Note(kind, text, fields))

    def want(self, role: Role, count: int) -> None:
        """Ask for so many workers of a role."""
        self.wanted[role] = count
        if self.operator_answered:
            self.emit(ev.ScaleRole(role, count))

    def queue_call(self, *workers: KnownWorker) -> None:
        """Choose the next call of these workers at the end of the event."""
        self.workers_to_call += workers

    def header(self, worker: KnownWorker, task: Task) -> Header:
        """Make the header of the next call: its number is above all before."""
        self._seq += 1
        return Header(task.task_id, task.attempt, worker.worker_id, worker.incarnation, self._seq)

    def call(self, worker: KnownWorker, task: Task, method: str, *args: Any) -> None:
        """Call a worker."""
        worker.call = ev.Send(*worker.key, method, self.header(worker, task), args)
        worker.called_at = self.now
        self.emit(worker.call)

    def call_again(self, worker: KnownWorker, call: ev.Send, delay: float) -> None:
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

    def must_close(self, worker: KnownWorker, task: Task) -> bool:
        """Return True if the worker must close the task as soon as it can.

        It leaves, the job ends, or the commander, which is asked again, has another task for it by now.
        """
        if self.ending is not None:
            return worker.is_leaving or self.ending.closes(task)
        return worker.is_leaving or (task.kind != "evaluate" and not self._is_still_wanted(worker.role, task))

    def _is_still_wanted(self, role: Role, task: Task) -> bool:
        """Return True if the commander still gives the task's worker the same task."""
        now, then = self.commander.task(role, task.index, self.view), task.start
        return now is not None and (now.policy_id, now.overrides) == (then.policy_id, then.overrides)

    def begin_ending(self, reason: str, evaluates: bool = False, by: str = "", *, failed: bool = False) -> None:
        """Begin the ending, which the condition `by` asks for. An ending under way is not changed."""
        if self.ending is None:
            self.reason = str(reason)  # a plain str: `status` may go where the class of the reason is not
            self.ending = JobEnding(failed, evaluates, self.now, self.limits.close_deadline, by)
            self.become(JobState.DRAINING)
            self.note("draining", f"The job ends: {reason}.", failed=failed)
            self.queue_call(*self.roster)

    def fail(self, reason: str) -> None:
        """Begin the ending of a failed job. An ending under way becomes a failure; the first failure is kept."""
        self.begin_ending(reason, failed=True)
        if self.ending is not None and not self.ending.failed:
            self.ending.failed = True
            self.reason = f"{self.reason}; but {reason}"
