"""The state machine of a job: events come in, effects go out, and nothing else happens.

Here are the ways in and out, and the state of the job. Each other matter has a room of its own, with a reference to
this one: who is there (`staff`), what comes next in the diagram (`work`), batches (`learning`), what was collected
(`collecting`), evaluations (`evaluating`), how tasks end (`outcomes`), how the job does (`ending`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlframe.coordinator.commander import Commander, View
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.accounts import Accounts
from rlframe.coordinator.core.collecting import Collecting
from rlframe.coordinator.core.ending import Ending
from rlframe.coordinator.core.evaluating import Evaluating
from rlframe.coordinator.core.learning import Learning
from rlframe.coordinator.core.limits import Limits
from rlframe.coordinator.core.outcomes import Outcomes
from rlframe.coordinator.core.roster import Roster
from rlframe.coordinator.core.staff import Staff
from rlframe.coordinator.core.tasks import Board, Task
from rlframe.coordinator.core.work import Work
from rlframe.coordinator.messages import ROLES, Role
from rlframe.coordinator.states import JobState, TaskState, check, is_over

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

    Attributes:
        now: when the newest event happened.
        manual: whether a person said how many collectors there are.
        min_version: that learners publish above, whatever this job has seen: the newest of the job before.
        paused: whether nothing is to be collected or learned for now.
        operator_answered: whether it has, since this coordinator began.
        operator_problem: why it cannot be reached; empty where it can.
        learner_came: whether a learner has started, so that the buffer which collectors write to is there.
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
        saved: dict[str, Any] | None = None,
    ) -> None:
        self.commander, self.limits, self.now, self.began = commander, limits, now, now
        self.state, self.reason = JobState.INIT, ""
        self.wanted: dict[Role, int] = {role: wanted.get(role, 0) for role in ROLES}
        self.manual = self.paused = False
        self.operator_answered, self.operator_problem = False, ""
        self.learner_came = False
        self.min_version = -1
        self.ending: Ending | None = None
        self._epoch = saved["epoch"] + 1 if saved is not None else 0  # how often a coordinator took it up
        self._out: list[Any] = []

        self.accounts, self.roster, self.tasks = Accounts(), Roster(limits), Board()
        self.staff, self.work, self.outcomes = Staff(self), Work(self, self._epoch * _EPOCH), Outcomes(self)
        self.learning, self.collecting, self.evaluating = Learning(self, by_key), Collecting(self), Evaluating(self)
        self._takes: dict[type, Callable[[Any], None]] = {
            ev.Submitted: self._submitted,
            ev.OperatorAnswered: self._operator_has,
            ev.OperatorFailed: self._operator_failed,
            ev.OperatorBroke: lambda event: self.end(True, f"the operator raised {event.why}"),
            ev.Replied: self.work.replied,
            ev.Unanswered: self.work.unanswered,
            ev.Drawn: self.learning.drawn,
            ev.Pinned: self.evaluating.pinned,
            ev.Scaled: self._scaled,
            ev.Paused: self._pause,
            ev.Resumed: self._resume,
            ev.Cancelled: self._cancelled,
            ev.EvaluationAsked: self._evaluation_asked,
            ev.CheckpointAsked: self._checkpoint_asked,
            ev.RestoreAsked: lambda _: self.outcomes.go_back(),
            ev.Disconnected: self._disconnected,
            ev.Ticked: self._ticked,
        }
        if saved is not None:
            self._restore(saved)

    # --- the two ways in and out

    def handle(self, event: Any, now: float) -> list[Any]:
        """Takes an event (see `events`) and gives the effects that come of it. Once the job is over nothing changes."""
        if is_over(self.state):
            return []
        self.now, self._out = max(now, self.now), []
        self._takes[type(event)](event)
        if self.ending is None and self.state is not JobState.INIT:
            self._check_stop()
        if self.ending is not None and not is_over(self.state):
            self.ending.go_on(self.now)
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
            "paused": self.paused,
            "learner_came": self.learner_came,
            "min_version": self.min_version,
            "evaluated_at": self.evaluating.began_at,
            "epoch": self._epoch,
            "row": self.collecting.to_json(),
            "task_count": self.tasks.count,
            "tasks": [task.to_json() for task in self.tasks],
            "staff": self.staff.to_json(),
            "accounts": self.accounts.to_json(),
            "ending": self.ending.to_json() if self.ending is not None else None,
        }

    def _restore(self, saved: dict[str, Any]) -> None:
        state = JobState(saved["state"])
        self.reason, self.wanted, self.manual = saved["reason"], dict(saved["wanted"]), saved["manual"]
        self.began, self.paused, self.learner_came = saved["began"], saved["paused"], saved["learner_came"]
        self.evaluating.began_at, self.min_version = saved["evaluated_at"], saved["min_version"]
        self.collecting.restore(saved["row"])
        self.accounts = Accounts(**saved["accounts"])
        self.tasks.count = saved["task_count"]
        self.staff.restore(saved["staff"])
        for each in saved["tasks"]:
            task = Task.from_json(each)
            self.accounts.lost += task.granted
            task.granted = 0
            self.tasks.put(task)
        self.state = state if is_over(state) else JobState.INIT
        self.accounts.coordinator_restarts += 1
        if saved["ending"] is not None and not is_over(state):
            self.ending = Ending.from_json(self, saved["ending"], self.now)

    @property
    def view(self) -> View:
        """How far the job is, for the commander."""
        newest = self.accounts.evaluations[-1] if self.accounts.evaluations else None
        return View(
            env_steps=self.accounts.env_steps,
            learner_steps=self.accounts.learner_steps,
            params_version=self.accounts.params_version,
            seconds=self.now - self.began,
            eval_return=newest[1] if newest else None,
            evaluated_at=self.evaluating.began_at,
        )

    # --- effects

    def emit(self, effect: Any) -> None:
        """Adds an effect to those that `handle` gives."""
        self._out.append(effect)

    def note(self, kind: str, text: str, **fields: Any) -> None:
        """Adds a line for the log of events."""
        self.emit(ev.Note(kind, text, fields))

    def want(self, role: Role, count: int) -> None:
        """Has at least so many workers of a role."""
        if self.wanted[role] < count:
            self.wanted[role] = count
            self._request(role)

    def _request(self, role: Role) -> None:
        if self.operator_answered:
            self.emit(ev.Request(role, self.wanted[role]))

    # --- the state of the job

    def become(self, state: JobState) -> None:
        """Changes it. Raises TransitionError where that cannot be."""
        if state is not self.state:
            check(self.state, state)
            before, self.state = self.state, state
            self.note("job", f"{before.value} → {state.value}", before=before.value, after=state.value)

    def end(self, failed: bool, reason: str, evaluates: bool = False) -> None:
        """Begins the ending; where it goes on already, it ends as a failure if this is one."""
        if self.ending is None:
            self.reason = reason
            self.ending = Ending(self, reason, failed=failed, evaluates=evaluates)
        elif failed:
            self.ending.fail(reason)

    def close(self, failed: bool, reason: str) -> None:
        """The last thing that happens to a job."""
        self.become(JobState.FAILED if failed else JobState.CLOSED)
        self.reason = reason
        self.collecting.write_row()
        self.note(self.state.value.lower(), f"The job is over: {reason}.")
        self.emit(ev.Over(failed, reason))

    def _check_stop(self) -> None:
        reason = self.commander.stop(self.view)
        if reason is not None:
            self.end(False, reason, evaluates=True)
        elif self.accounts.params_version >= 0 and not self.tasks.open("evaluate"):
            policy_id = self.commander.evaluation(self.view)
            if policy_id is not None:
                self.evaluating.begin(policy_id)

    def _settle_state(self) -> None:
        """What the state of the job is follows from what there is."""
        if self.ending is not None or self.state is JobState.INIT or is_over(self.state):
            return
        learns = any(task.state is TaskState.RUNNING for task in self.tasks.open("learn"))
        if self.state is JobState.CONNECTING:
            if self.operator_answered:
                self.become(JobState.WAITING)
        elif self.paused:
            self.become(JobState.PAUSED)
        elif learns:
            self.become(JobState.RUNNING)
        elif self.learner_came:
            if self.state is JobState.WAITING:  # after a restart of the coordinator
                self.become(JobState.RUNNING)
            self.become(JobState.DEGRADED)
        elif self.state is JobState.PAUSED:
            self.become(JobState.WAITING)

    # --- what happens

    def _submitted(self, event: ev.Submitted) -> None:
        if self.state is JobState.INIT:
            self.become(JobState.CONNECTING)
            self.emit(ev.Connect())
            self.staff.wait_from_now()
            self.evaluating.take_up()

    def _operator_has(self, event: ev.OperatorAnswered) -> None:
        if not self.operator_answered or self.operator_problem:
            if self.operator_problem:
                self.note("operator", "The operator answers again.")
            self.operator_answered, self.operator_problem = True, ""
            for role in ROLES:
                self._request(role)
        self.staff.listed(event.workers)

    def _operator_failed(self, event: ev.OperatorFailed) -> None:
        if not self.operator_problem:
            self.note("operator", f"The operator cannot be reached; the workers go on. {event.why}")
        self.operator_problem = event.why or "it does not answer"

    def _ticked(self, event: ev.Ticked) -> None:
        self.staff.look()
        why = self.staff.why_nobody_comes()
        if why and self.ending is None:
            self.end(True, why)

    def _disconnected(self, event: ev.Disconnected) -> None:
        if self.ending is not None:
            self.ending.disconnected(event.why)

    # --- what a person asks for

    def _scaled(self, event: ev.Scaled) -> None:
        self.manual = self.manual or (event.role == "collector" and event.by == "request")
        before = self.wanted[event.role]
        if before == event.count or self.ending is not None:
            return
        self.wanted[event.role] = event.count
        text = f"{event.role}s: {before} → {event.count} ({event.by})"
        self.note("scaled", text, role=event.role, wanted=event.count)
        self._request(event.role)
        here = [worker for worker in self.roster.of(event.role) if worker.is_here]
        for worker in here[event.count :]:
            self.staff.remove(worker)

    def _pause(self, event: ev.Paused) -> None:
        if not self.paused:
            self.paused = True
            self.note("paused", "Paused.")

    def _resume(self, event: ev.Resumed) -> None:
        if self.paused:
            self.paused = False
            self.note("resumed", "Resumed.")
            for worker in self.roster:
                worker.progress_at = self.now
            self.work.drive_all()

    def _cancelled(self, event: ev.Cancelled) -> None:
        self.end(False, event.reason)
        if self.ending is not None:
            self.ending.hurry(event.within)

    def _evaluation_asked(self, event: ev.EvaluationAsked) -> None:
        if self.ending is None and not self.tasks.open("evaluate"):
            self.evaluating.begin(self.commander.final_policy())

    def _checkpoint_asked(self, event: ev.CheckpointAsked) -> None:
        self.learning.save()
        self.emit(ev.SaveReplay())
        self.note("checkpoint", "The learner saves with its next update.")
