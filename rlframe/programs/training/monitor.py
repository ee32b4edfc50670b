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
from rlframe.programs.policies.evaluation import EvaluationOutcome, try_evaluation
from rlframe.programs.run_dir.directory import Result
from rlframe.programs.session import EarlyStop, Schedule, Session
from rlframe.programs.training.progress import ProgressFile
from rlframe.programs.training.row_writer import RowWriter
from rlframe.types import Logs

_log = logging.getLogger(__name__)

PendingEvaluation = futures.Future[EvaluationOutcome]

POLL_SECONDS = 0.1  # seconds between two rounds of questions to the nodes
_POLLING = Phase("looking at the others", 300.0)
_FINISH_WITHIN = 3600.0  # seconds that the learner has for its last update and checkpoint, or to come back for them


class Monitor(abc.ABC):
    """Ends a run at its last step, evaluates the final policy, and then returns from `run()`.

    It asks the nodes for their progress, and never waits for a node that collects: a dead or paused one does not delay
    it. The monitor itself may be restarted: its counts are in the run directory. A subclass defines a step, and how to
    evaluate.

    `run` calls `_watch` until the session ends, and then `_finish`. Evaluations run in a thread beside them:

        _watch   _poll_nodes, _write_row, _begin_evaluation, _write_evaluation: ten times a second, what is due
        _finish  _let_learner_finish, _write_row, _evaluate_finished_learner

    Args:
        session: the session.
        learner: a Learner, or a handle to one.
    """

    def __init__(self, session: Session, learner: Any) -> None:
        self._session, self._experiment = session, session.experiment
        self._stop = threading.Event()
        self._learner = handles.resolve(learner, "learner", deadline=session.peer_deadline, stop=self._stop)
        self._poll_learner = handles.Poller(self._learner, "stats")
        self._poll_finish = handles.Poller(self._learner, "finish")
        self._learner_stats: dict[str, Any] = {}  # the newest; one that has just restarted has none
        self._progress = ProgressFile(session.directory.progress, session.session_id)
        self._early_stop = EarlyStop(session, self._progress.ended)
        # An evaluation that was due when the monitor was killed is due still.
        self._evaluation_schedule = Schedule(self._experiment.eval_every, self._progress.evaluated or 0)
        self._evaluation: PendingEvaluation | None = None  # under way

    def run(self) -> None:
        """Watch the program until the session's last step, and evaluate the final policy; or until `stop()`."""
        with handles.stop_with_program(self.stop):
            try:
                self._begin()
            except StoppedError:
                return
            self._progress.try_to_save()
            self._rows = RowWriter(self._session, self.step, self._progress.counts)
            evaluation, stopped_by = EvaluationOutcome(self.step), "interrupt"
            try:
                by = self._watch()
                evaluation, stopped_by = self._finish(), by
            except StoppedError:
                pass
            finally:
                self.stop()  # an evaluation that is under way
                self._progress.save()
                self._rows.close()
        self._session.directory.write_result(self._result(evaluation, stopped_by))

    def stop(self) -> None:
        """End `run()`, without an evaluation. Any thread may call it."""
        self._stop.set()

    def end(self, by: str, evaluate: bool = True) -> None:
        """End `run()` as at the last step. Any thread or node may call it, again and again; see `EarlyStop.request`."""
        self._early_stop.request(by, evaluate)

    @property
    @abc.abstractmethod
    def step(self) -> int:
        """Steps so far, with those of earlier sessions, in the unit of the logs."""

    @abc.abstractmethod
    def _poll_nodes(self) -> None:
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
    def _result(self, evaluation: EvaluationOutcome, stopped_by: str) -> Result:
        """How the session ended."""

    def _begin(self) -> None:  # noqa: B027
        """Prepare for the first questions."""

    def _pause_actors(self) -> None:  # noqa: B027
        """Keep nodes from collecting more, once the session ends. Call it repeatedly: it never waits."""

    def _warn_about_missing_updates(self) -> None:  # noqa: B027
        """Warn if the learner made fewer updates than it should."""

    def _values(self) -> dict[str, Any]:
        """Return the values of a row beside the counts."""
        return {name: value for name, value in self._learner_stats.items() if name != "finished"}

    def _evaluation_row(self, values: Logs) -> dict[str, Any]:
        return evaluation_row(values)

    def _watch(self) -> str:
        """Write rows and evaluate, until the session ends. Return why it does, as `Result.stopped_by`."""
        at_start = self.step
        row_schedule = Schedule(self._experiment.row_every, at_start)
        while not self._stop.wait(POLL_SECONDS):
            with _POLLING:
                self._poll_nodes()
            now = self.step
            if now > at_start:
                self._rows.record_step(now)
            if self._is_done():
                return self._session.last_step_reason
            learner_steps = self._learner_stats.get("learner_steps", 0)
            if (by := self._early_stop.check_limits(learner_steps, self._rows.eval_return)) is not None:
                self._progress.ended = by  # before the learner is told: this node may be restarted
                self._progress.try_to_save()
                return by
            if row_schedule.advance_to(now):
                self._write_row()
            if self._evaluation is None:
                if self._evaluation_schedule.advance_to(now):
                    self._start_evaluation(final=False)
            elif self._evaluation.done():
                self._write_evaluation(self._evaluation)
        self._poll_nodes()
        self._write_row()
        raise StoppedError("Told to stop before the last step.")

    def _finish(self) -> EvaluationOutcome:
        """Let the learner finish, then evaluate its last policy, if that is wanted."""
        self._finish_learner()
        self._write_row()
        if not self._early_stop.evaluates:
            return EvaluationOutcome(self.step)
        self._warn_about_missing_updates()
        if self._evaluation is not None:
            self._write_evaluation(self._wait_for(self._evaluation))
        if not self._session.topology_config.evaluates:
            return EvaluationOutcome(self.step)
        return self._evaluate_finished_learner()

    def _evaluate_finished_learner(self) -> EvaluationOutcome:
        """Evaluate the learner's last policy.

        A learner that dies meanwhile is restarted, and may learn on before it is told to finish again. Then the policy
        has changed, and is evaluated again.
        """
        while True:
            learner_steps = self._learner_stats["learner_steps"]
            evaluation = self._wait_for(self._start_evaluation(final=True))
            self._finish_learner()
            if self._learner_stats["learner_steps"] == learner_steps:
                return self._write_evaluation(evaluation)
            _log.warning("The learner came back during the evaluation, and learned on: its end is evaluated again.")

    def _finish_learner(self) -> None:
        """Tell the learner to finish, wait for it, and take its stats. Hold the actors meanwhile.

        Raises:
            PeerError: it did not in time.
            StoppedError: `stop()` was called before.
        """
        deadline = time.monotonic() + _FINISH_WITHIN
        self._pause_actors()
        while not (stats := self._learner.stats())["finished"]:
            self._learner.finish()
            if time.monotonic() > deadline:
                raise PeerError(f"The learner had not finished {_FINISH_WITHIN:g} s after it was told to.")
            self._pause("the learner had finished")
            self._pause_actors()
        self._learner_stats = stats

    def _start_evaluation(self, *, final: bool) -> PendingEvaluation:
        evaluate = functools.partial(self._evaluate, final=final)
        self._evaluation = _evaluate_in_thread(functools.partial(try_evaluation, evaluate, self.step, final=final))
        return self._evaluation

    def _wait_for(self, evaluation: PendingEvaluation) -> PendingEvaluation:
        while not evaluation.done():
            self._poll_finish()  # again: a restarted learner would continue to learn
            self._pause_actors()
            self._pause("the final policy was evaluated")
        return evaluation

    def _pause(self, until: str) -> None:
        if self._stop.wait(POLL_SECONDS):
            raise StoppedError(f"Told to stop before {until}.")

    def _write_row(self) -> None:
        if self._rows.write(self.step, self._progress.counts, self._values):
            self._progress.try_to_save()

    def _write_evaluation(self, evaluation: PendingEvaluation) -> EvaluationOutcome:
        """Write the row of an evaluation that is done, unless it failed. Return its outcome."""
        self._evaluation, outcome = None, evaluation.result()
        if outcome.values:
            self._rows.log_evaluation(self.step, self._evaluation_row(outcome.values))
            self._progress.evaluated = outcome.step
            self._progress.try_to_save()
        return outcome


def _evaluate_in_thread(evaluate: Callable[[], EvaluationOutcome]) -> PendingEvaluation:
    """Evaluate in a thread, which does not keep the process from ending."""
    result: PendingEvaluation = futures.Future()

    def run() -> None:
        try:
            result.set_result(evaluate())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="rlframe evaluation", daemon=True).start()
    return result
