"""The monitor of a program: it counts steps, writes the logs, evaluates the policy, and ends the run."""

from __future__ import annotations

import abc
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from rlframe import handles
from rlframe.errors import PeerError, StoppedError
from rlframe.interprocess.phases import Phase
from rlframe.metrics.rows import evaluation_row
from rlframe.programs.policies.evaluation import try_evaluation
from rlframe.programs.run_dir.directory import Result
from rlframe.programs.session import Ending, Schedule, Session
from rlframe.programs.training.progress import Progress
from rlframe.programs.training.row_writer import RowWriter
from rlframe.types import Logs

_log = logging.getLogger(__name__)

LOOK_EVERY = 0.1  # seconds between two looks at the nodes
_LOOKING = Phase("looking at the others", 300.0)
_FINISH_WITHIN = 3600.0  # seconds that the learner has for its last update and checkpoint, or to come back for them


class Monitor(abc.ABC):
    """Ends a run at its last step, evaluates the final policy, and then returns from `run()`.

    It asks the nodes for their progress, and never waits for a node that collects: a dead or paused one does not delay
    it. The monitor itself may be restarted: its counts are in the run directory. A subclass defines a step, and how to
    evaluate.

    Args:
        session: the session.
        learner: a Learner, or a handle to one.
    """

    def __init__(self, session: Session, learner: Any) -> None:
        self._session, self._experiment = session, session.experiment
        self._stop = threading.Event()
        self._learner = handles.resolve(learner, "learner", deadline=session.peer_deadline, stop=self._stop)
        self._ask_learner = handles.Poll(self._learner, "stats")
        self._tell_learner = handles.Poll(self._learner, "finish")
        self._learned: dict[str, Any] = {}  # the learner's newest stats; one that has just restarted knows nothing
        self._progress = Progress(session.directory.progress, session.session_id)
        self._ending = Ending(session, self._progress.ended)
        self._rows: RowWriter | None = None
        self._evaluates_at: int | None = None  # the step at which the evaluation under way began
        self._evaluation_error: str | None = None  # why the final evaluation failed

    def run(self) -> None:
        """Watch the program until the session's last step, and evaluate the final policy; or until `stop()`."""
        evaluation, stopped_by = None, "interrupt"
        try:
            with handles.stopped_by_program(self.stop):
                self._begin()
                self._progress.try_to_save()
                rows = self._rows = RowWriter(self._session, self.step, self._progress.counts)
                try:
                    if (by := self._watch(rows)) is not None:
                        evaluation = self._finish(rows)
                        stopped_by = by
                finally:
                    self._end()
                    self._progress.save()
                    rows.close()
        except StoppedError:
            pass
        if self._rows is not None:
            self._session.directory.write_result(self._result(self._rows, evaluation, stopped_by))

    def stop(self) -> None:
        """End `run()`, without an evaluation. Any thread may call it."""
        self._stop.set()

    def end(self, by: str, evaluate: bool = True) -> None:
        """End `run()` as at the last step. Any thread or node may call it, again and again; see `Ending.ask`."""
        self._ending.ask(by, evaluate)

    @property
    @abc.abstractmethod
    def step(self) -> int:
        """Steps so far, with those of earlier sessions, in the unit of the logs."""

    @abc.abstractmethod
    def _look(self) -> None:
        """Ask every node for its progress, without waiting for answers."""

    @abc.abstractmethod
    def _took_all(self) -> bool:
        """Return True once the session's last step was taken."""

    @abc.abstractmethod
    def _begin_evaluation(self, *, final: bool) -> None:
        """Start an evaluation of the newest policy: `final` after training, else during it. Raise if that fails."""

    @abc.abstractmethod
    def _poll_evaluation(self, *, final: bool) -> Logs | None:
        """Return the values of the evaluation under way; None before it is done. Raise if it failed."""

    @abc.abstractmethod
    def _result(self, rows: RowWriter, evaluation: Logs | None, stopped_by: str) -> Result:
        """How the session ended."""

    def _begin(self) -> None:  # noqa: B027
        """Prepare for the first look."""

    def _hold(self) -> None:  # noqa: B027
        """Keep nodes from collecting more, once the session ends. Call it repeatedly: it never waits."""

    def _end(self) -> None:  # noqa: B027
        """Clean up after the last look."""

    def _values(self) -> dict[str, Any]:
        """Return the values of a row beside the counts."""
        return {name: value for name, value in self._learned.items() if name != "finished"}

    def _evaluations_due(self) -> Schedule:
        """Return when to evaluate. An evaluation that was due when the monitor was killed is due still."""
        return Schedule(self._experiment.eval_every, self._progress.evaluated or 0)

    def _evaluation_row(self, values: Logs) -> dict[str, Any]:
        return evaluation_row(values)

    def _watch(self, rows: RowWriter) -> str | None:
        """Return why the session ends, as `Result.stopped_by`; None if it was stopped first."""
        at_start = self.step
        rows_due, evaluations_due = Schedule(self._experiment.row_every, at_start), self._evaluations_due()
        while not self._stop.wait(LOOK_EVERY):
            with _LOOKING:
                self._look()
            now = self.step
            if now > at_start:
                rows.note(now)
            if self._took_all():
                return self._session.last_step_is
            if self._ending.is_due(self._learned.get("learner_steps", 0)):
                self._progress.ended = self._ending.by  # before the learner is told: this node may be restarted
                self._progress.try_to_save()
                return self._ending.by
            if rows_due.is_due(now):
                self._write_row(rows)
            if self._evaluates_at is not None:
                if (values := self._try(self._poll_evaluation, final=False)) is not None:
                    self._write_evaluation(rows, values)
            elif evaluations_due.is_due(now):
                self._evaluates_at = now
                if not self._begins_evaluation(final=False):
                    self._evaluates_at = None
        self._look()
        self._write_row(rows)
        return None

    def _finish(self, rows: RowWriter) -> Logs | None:
        """Let the learner finish, then evaluate its last policy. None if no evaluation is wanted, or if it failed."""
        self._learned = finish(self._learner, self._stop, self._hold)
        self._write_row(rows)
        if not self._ending.evaluates:
            return None
        self._say_what_is_missing()
        if self._evaluates_at is not None:
            self._write_evaluation(rows, self._wait_for_evaluation(final=False))
        if not getattr(self._session.topology_config, "eval_episodes", True):
            return None
        while True:
            self._evaluates_at, self._evaluation_error = self.step, None
            values = self._wait_for_evaluation(final=True) if self._begins_evaluation(final=True) else {}
            evaluated, self._learned = self._learned, finish(self._learner, self._stop, self._hold)
            if self._learned["learner_steps"] == evaluated["learner_steps"]:
                self._write_evaluation(rows, values)
                return values if self._evaluation_error is None else None
            _log.warning("The learner came back during the evaluation, and learned on: its end is evaluated again.")

    def _say_what_is_missing(self) -> None:
        """Warn if the learner made no update."""
        if self._learned["learner_steps"] == 0:
            _log.warning(
                "No update was made in %d environment steps. Run for more steps, or let learning begin earlier.",
                self.step,
            )

    def _begins_evaluation(self, *, final: bool) -> bool:
        """Start an evaluation. Return False if that fails."""
        return self._try(self._begin_evaluation, final=final) is None

    def _try(self, do: Callable[..., Logs | None], *, final: bool) -> Logs | None:
        """Begin or poll an evaluation, and return the result. If that fails, keep the reason or warn, and return {}."""
        step = self.step if self._evaluates_at is None else self._evaluates_at
        values, problem = try_evaluation(functools.partial(do, final=final), step, final=final)
        if problem is None:
            return values
        self._evaluation_error = problem if final else None
        return {}

    def _wait_for_evaluation(self, *, final: bool) -> Logs:
        while (values := self._try(self._poll_evaluation, final=final)) is None:
            self._tell_learner()  # again: a restarted learner would continue to learn
            self._hold()
            self._pause("the final policy was evaluated")
        return values

    def _pause(self, until: str) -> None:
        if self._stop.wait(LOOK_EVERY):
            raise StoppedError(f"Told to stop before {until}.")

    def _write_row(self, rows: RowWriter) -> None:
        if rows.write(self.step, self._progress.counts, self._values):
            self._progress.try_to_save()

    def _write_evaluation(self, rows: RowWriter, values: Logs) -> None:
        began, self._evaluates_at = self._evaluates_at, None
        if values:
            row = self._evaluation_row(values)
            self._ending.note_evaluation(row["return_mean"])
            rows.log(self.step, row)
            self._progress.evaluated = began
            self._progress.try_to_save()


def finish(learner: Any, stop: threading.Event, meanwhile: Callable[[], None]) -> dict[str, Any]:
    """Tell a learner to finish, and wait for it. Return its stats. Call `meanwhile` repeatedly, at least once.

    Raises:
        PeerError: it did not in time.
        StoppedError: `stop` was set before.
    """
    deadline = time.monotonic() + _FINISH_WITHIN
    meanwhile()
    while not (stats := learner.stats())["finished"]:
        learner.finish()
        if time.monotonic() > deadline:
            raise PeerError(f"The learner had not finished {_FINISH_WITHIN:g} s after it was told to.")
        if stop.wait(LOOK_EVERY):
            raise StoppedError("Told to stop before the learner had finished.")
        meanwhile()
    return stats
