"""The monitor of a program: it counts steps, writes the logs, evaluates the policy, and ends the run."""

from __future__ import annotations

import abc
import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent import futures
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

Evaluation = futures.Future[tuple[Logs | None, str | None]]  # of what `try_evaluation` returns

ASK_EVERY = 0.1  # seconds between two rounds of questions to the nodes
_ASKING = Phase("looking at the others", 300.0)
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
        self._learner_stats: dict[str, Any] = {}  # the newest; one that has just restarted has none
        self._progress = Progress(session.directory.progress, session.session_id)
        self._ending = Ending(session, self._progress.ended)
        self._rows: RowWriter | None = None
        self._evaluation: Evaluation | None = None  # under way
        self._evaluates_at = 0  # the step at which it began
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
                    self.stop()  # an evaluation that is under way
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
    def _ask_nodes(self) -> None:
        """Ask every node for its progress, without waiting for answers."""

    @abc.abstractmethod
    def _is_done(self) -> bool:
        """Return True once the session's last step was taken."""

    @abc.abstractmethod
    def _evaluate(self, *, final: bool) -> Logs:
        """Return the values of an evaluation of the newest policy: `final` after training, else during it.

        It is called in a thread. It raises if the evaluation fails, or StoppedError after `stop()`.
        """

    @abc.abstractmethod
    def _result(self, rows: RowWriter, evaluation: Logs | None, stopped_by: str) -> Result:
        """How the session ended."""

    def _begin(self) -> None:  # noqa: B027
        """Prepare for the first questions."""

    def _hold_actors(self) -> None:  # noqa: B027
        """Keep nodes from collecting more, once the session ends. Call it repeatedly: it never waits."""

    def _warn_of_missing_updates(self) -> None:  # noqa: B027
        """Warn if the learner made fewer updates than it should."""

    def _values(self) -> dict[str, Any]:
        """Return the values of a row beside the counts."""
        return {name: value for name, value in self._learner_stats.items() if name != "finished"}

    def _evaluations_due(self) -> Schedule:
        """Return when to evaluate. An evaluation that was due when the monitor was killed is due still."""
        return Schedule(self._experiment.eval_every, self._progress.evaluated or 0)

    def _evaluation_row(self, values: Logs) -> dict[str, Any]:
        return evaluation_row(values)

    def _watch(self, rows: RowWriter) -> str | None:
        """Return why the session ends, as `Result.stopped_by`; None if it was stopped first."""
        at_start = self.step
        rows_due, evaluations_due = Schedule(self._experiment.row_every, at_start), self._evaluations_due()
        while not self._stop.wait(ASK_EVERY):
            with _ASKING:
                self._ask_nodes()
            now = self.step
            if now > at_start:
                rows.note_step(now)
            if self._is_done():
                return self._session.last_step_reason
            if self._ending.is_due(self._learner_stats.get("learner_steps", 0)):
                self._progress.ended = self._ending.by  # before the learner is told: this node may be restarted
                self._progress.try_to_save()
                return self._ending.by
            if rows_due.is_due(now):
                self._write_row(rows)
            if self._evaluation is None:
                if evaluations_due.is_due(now):
                    self._begin_evaluation(final=False)
            elif self._evaluation.done():
                self._write_evaluation(rows, self._evaluation)
        self._ask_nodes()
        self._write_row(rows)
        return None

    def _finish(self, rows: RowWriter) -> Logs | None:
        """Let the learner finish, then evaluate its last policy. None if no evaluation is wanted, or if it failed."""
        self._learner_stats = finish(self._learner, self._stop, self._hold_actors)
        self._write_row(rows)
        if not self._ending.evaluates:
            return None
        self._warn_of_missing_updates()
        if self._evaluation is not None:
            self._write_evaluation(rows, self._wait_for(self._evaluation))
        if not self._session.topology_config.evaluates:
            return None
        while True:
            evaluation = self._wait_for(self._begin_evaluation(final=True))
            evaluated, self._learner_stats = (
                self._learner_stats,
                finish(self._learner, self._stop, self._hold_actors),
            )
            if self._learner_stats["learner_steps"] == evaluated["learner_steps"]:
                values, self._evaluation_error = self._write_evaluation(rows, evaluation)
                return values
            _log.warning("The learner came back during the evaluation, and learned on: its end is evaluated again.")

    def _begin_evaluation(self, *, final: bool) -> Evaluation:
        self._evaluates_at = self.step
        evaluate = functools.partial(self._evaluate, final=final)
        self._evaluation = _in_thread(functools.partial(try_evaluation, evaluate, self.step, final=final))
        return self._evaluation

    def _wait_for(self, evaluation: Evaluation) -> Evaluation:
        while not evaluation.done():
            self._tell_learner()  # again: a restarted learner would continue to learn
            self._hold_actors()
            self._pause("the final policy was evaluated")
        return evaluation

    def _pause(self, until: str) -> None:
        if self._stop.wait(ASK_EVERY):
            raise StoppedError(f"Told to stop before {until}.")

    def _write_row(self, rows: RowWriter) -> None:
        if rows.write(self.step, self._progress.counts, self._values):
            self._progress.try_to_save()

    def _write_evaluation(self, rows: RowWriter, evaluation: Evaluation) -> tuple[Logs | None, str | None]:
        """Write the row of an evaluation that is done, unless it failed. Return its result."""
        self._evaluation = None
        values, problem = evaluation.result()
        if values:
            row = self._evaluation_row(values)
            self._ending.note_evaluation(row["return_mean"])
            rows.log(self.step, row)
            self._progress.evaluated = self._evaluates_at
            self._progress.try_to_save()
        return values, problem


def _in_thread(evaluate: Callable[[], tuple[Logs | None, str | None]]) -> Evaluation:
    """Evaluate in a thread, which does not keep the process from ending."""
    result: Evaluation = futures.Future()

    def run() -> None:
        try:
            result.set_result(evaluate())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="rlframe evaluation", daemon=True).start()
    return result


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
        if stop.wait(ASK_EVERY):
            raise StoppedError("Told to stop before the learner had finished.")
        meanwhile()
    return stats
