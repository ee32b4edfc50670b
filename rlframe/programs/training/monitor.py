"""The monitor of a program. It counts steps, writes the logs, evaluates the policy, and ends the run."""

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
from rlframe.interprocess.heartbeat import Phase
from rlframe.metrics.rows import evaluation_row
from rlframe.programs.policies.evaluation import EvaluationOutcome, try_evaluation
from rlframe.programs.run_dir.directory import ProgressFile, Result
from rlframe.programs.session import EarlyStop, Schedule, Session
from rlframe.programs.training.row_writer import RowWriter
from rlframe.types import Logs

_log = logging.getLogger(__name__)

PendingEvaluation = futures.Future[EvaluationOutcome]

POLL_SECONDS = 0.1  # seconds between two polls of the nodes
_POLLING = Phase("polling the nodes", 300.0)
_FINISH_TIMEOUT = 3600.0  # maximum seconds for the learner's last update and checkpoint, even if it restarts


class Monitor(abc.ABC):
    """A node that ends the run at its last step and evaluates the final policy.

    The monitor polls the nodes for their progress. It never waits for an actor, so a dead or paused actor does not
    delay the monitor. A restarted monitor continues, because its counts are in the run directory. A subclass defines
    what a step is, and how to evaluate.

    `run` calls `_watch` until the session ends, and then `_finish`. Evaluations run in a separate thread.

        _watch   _poll_nodes, _write_row, _start_evaluation, _write_evaluation: ten times a second, if due
        _finish  _finish_learner, _write_row, _evaluate_finished_learner

    Args:
        session: The session.
        learner: A Learner, or a handle to one.
    """

    def __init__(self, session: Session, learner: Any) -> None:
        self._session, self._experiment = session, session.experiment
        self._stop = threading.Event()
        self._learner = handles.resolve(learner, "learner", deadline=session.peer_deadline, stop=self._stop)
        self._poll_learner = handles.Poller(self._learner, "stats")
        self._poll_finish = handles.Poller(self._learner, "finish")
        self._learner_stats: dict[str, Any] = {}  # newest stats of the learner; empty until it answers
        self._progress = ProgressFile(session.directory.progress, session.session_id)
        self._early_stop = EarlyStop(session, self._progress.ended)
        # If an earlier monitor was killed during an evaluation, that evaluation is due again.
        self._evaluation_schedule = Schedule(self._experiment.eval_every, self._progress.evaluated or 0)
        self._evaluation: PendingEvaluation | None = None  # the running evaluation

    def run(self) -> None:
        """Monitor the program until its last step, then evaluate the final policy. `stop()` ends this early."""
        with handles.stop_with_program(self.stop):
            try:
                self._prepare()
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
                self.stop()  # `stop` also stops a running evaluation
                self._progress.save()
                self._rows.close()
        self._session.directory.write_result(self._result(evaluation, stopped_by))

    def stop(self) -> None:
        """End `run()` without an evaluation. Any thread can call this."""
        self._stop.set()

    def end(self, by: str, evaluate: bool = True) -> None:
        """End `run()` as if the last step were reached. Any thread or node can call this, also repeatedly.

        See `EarlyStop.request` for the arguments.
        """
        self._early_stop.request(by, evaluate)

    @property
    @abc.abstractmethod
    def step(self) -> int:
        """Number of steps so far, including earlier sessions. Environment steps for games, else learner steps."""

    @abc.abstractmethod
    def _poll_nodes(self) -> None:
        """Request the progress of every node. Do not wait for the answers."""

    @abc.abstractmethod
    def _is_done(self) -> bool:
        """Return True if the session has reached its last step."""

    @abc.abstractmethod
    def _evaluate(self, *, final: bool) -> Logs:
        """Evaluate the newest policy, and return the metrics. The monitor calls this in a separate thread.

        Args:
            final: True after training, False during training.

        Raises:
            StoppedError: `stop()` was called.
            RlframeError: The evaluation failed.
        """

    @abc.abstractmethod
    def _result(self, evaluation: EvaluationOutcome, stopped_by: str) -> Result:
        """Return the result of the session."""

    def _prepare(self) -> None:  # noqa: B027
        """Prepare the monitor before it polls the nodes for the first time."""

    def _pause_actors(self) -> None:  # noqa: B027
        """Request all actors to pause. Call this repeatedly, because it does not wait for answers."""

    def _warn_about_missing_updates(self) -> None:  # noqa: B027
        """Warn if the learner made fewer updates than expected."""

    def _values(self) -> dict[str, Any]:
        """Return the additional values of a row of the logs, such as the learner's stats."""
        return {name: value for name, value in self._learner_stats.items() if name != "finished"}

    def _evaluation_row(self, values: Logs) -> dict[str, Any]:
        return evaluation_row(values)

    def _watch(self) -> str:
        """Write rows and evaluate until the session ends. Return the reason of the end (see `Result.stopped_by`)."""
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
                self._progress.ended = by  # save the reason now, because this node can be restarted
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
        raise StoppedError("The monitor was stopped before the last step.")

    def _finish(self) -> EvaluationOutcome:
        """Wait until the learner has finished. Then evaluate its last policy, if evaluations are on."""
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

        If the learner dies during the evaluation, the launcher restarts it, and it can make more updates before it
        finishes again. Then the policy has changed, so evaluate it again.
        """
        while True:
            learner_steps = self._learner_stats["learner_steps"]
            evaluation = self._wait_for(self._start_evaluation(final=True))
            self._finish_learner()
            if self._learner_stats["learner_steps"] == learner_steps:
                return self._write_evaluation(evaluation)
            _log.warning("The learner restarted during the evaluation and made more updates. Evaluating again.")

    def _finish_learner(self) -> None:
        """Request the learner to finish, wait until it has finished, and store its stats. Pause the actors.

        Raises:
            PeerError: The learner did not finish in time.
            StoppedError: `stop()` was called before the learner finished.
        """
        deadline = time.monotonic() + _FINISH_TIMEOUT
        self._pause_actors()
        while not (stats := self._learner.stats())["finished"]:
            self._learner.finish()
            if time.monotonic() > deadline:
                raise PeerError(f"The learner did not finish within {_FINISH_TIMEOUT:g} s of the request.")
            self._pause("the learner finished")
            self._pause_actors()
        self._learner_stats = stats

    def _start_evaluation(self, *, final: bool) -> PendingEvaluation:
        evaluate = functools.partial(self._evaluate, final=final)
        self._evaluation = _evaluate_in_thread(functools.partial(try_evaluation, evaluate, self.step, final=final))
        return self._evaluation

    def _wait_for(self, evaluation: PendingEvaluation) -> PendingEvaluation:
        while not evaluation.done():
            self._poll_finish()  # request again, because a restarted learner would learn
            self._pause_actors()
            self._pause("the final policy was evaluated")
        return evaluation

    def _pause(self, until: str) -> None:
        if self._stop.wait(POLL_SECONDS):
            raise StoppedError(f"The monitor was stopped before {until}.")

    def _write_row(self) -> None:
        if self._rows.write(self.step, self._progress.counts, self._values):
            self._progress.try_to_save()

    def _write_evaluation(self, evaluation: PendingEvaluation) -> EvaluationOutcome:
        """Return the outcome of a completed evaluation. If it succeeded, write its row."""
        self._evaluation, outcome = None, evaluation.result()
        if outcome.values:
            self._rows.log_evaluation(self.step, self._evaluation_row(outcome.values))
            self._progress.evaluated = outcome.step
            self._progress.try_to_save()
        return outcome


def _evaluate_in_thread(evaluate: Callable[[], EvaluationOutcome]) -> PendingEvaluation:
    """Evaluate in a daemon thread, which does not prevent the process from exiting."""
    result: PendingEvaluation = futures.Future()

    def run() -> None:
        try:
            result.set_result(evaluate())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="rlframe evaluation", daemon=True).start()
    return result
