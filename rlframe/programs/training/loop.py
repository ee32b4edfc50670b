"""The training loop of a run in one process, with logs, evaluations and checkpoints."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import threading
import time
from typing import Any

from rlframe.engines.stopping import StopSignal
from rlframe.errors import CheckpointError, EnvError, ForcedExitError, StoppedError
from rlframe.learners import Checkpointer
from rlframe.learners.saving import BestCheckpoint
from rlframe.learners.update import as_numbers
from rlframe.metrics.rows import ActorCounts, evaluation_row
from rlframe.programs.policies.evaluation import EvaluationOutcome, Evaluations, try_evaluation
from rlframe.programs.session import EarlyStop, Schedule, Session
from rlframe.programs.training.driver import Driver
from rlframe.programs.training.row_writer import RowWriter
from rlframe.programs.training.updates import warn_if_no_updates
from rlframe.types import Logs

_log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 0.25  # seconds between two updates of the progress display


# Modules that a run first needs when it saves and logs. Matplotlib is not in this list: after its import, the rest of
# the process is slower (DQN with a small network takes 1 to 7 % more time: benchmarks/notes/speed.md).
_LATE_MODULES = ("orbax.checkpoint", "tensorboardX.record_writer")


def import_late_modules(*more: str) -> None:
    """Import modules that a run needs later. At the start, this takes no extra time: another thread compiles.

    Code that uses a module reports its errors.
    """
    for name in (*_LATE_MODULES, *more):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


class TrainingLoop:
    """A loop that trains in one process, for one session of a run: a driver makes the steps and updates.

    A checkpoint contains the states of the learner and of the driver.

    `run` calls `_train` until the session ends, then saves and evaluates:

        _train  driver.advance, and _run_due_tasks: _write_row, _evaluate, _save
        then    _write_row, _save, _evaluate

    Args:
        session: The session.
        driver: The driver. The loop closes it.
        replay_checkpoint_every: Steps between two saves of a large replay buffer. 0 means to save it only in the last
            checkpoint. A small replay buffer is saved in each checkpoint.
    """

    def __init__(self, session: Session, driver: Driver, replay_checkpoint_every: int = 0) -> None:
        self.driver, self.learner = driver, driver.learner
        self._session, self._directory = session, session.directory
        experiment = self._experiment = session.experiment
        group = None if session.shared is None else session.shared.group
        self._evaluations = Evaluations(experiment, session.agent, self.learner, group=group)
        self._stop = StopSignal(session.quiet) if session.shared is None else session.shared.stop
        self._early_stop = EarlyStop(session)
        self._thread_id: int | None = None  # thread of `run`
        self._save_requested = threading.Event()  # set by another thread
        self._learner_logs: Logs | None = None  # logs of the newest update since the last row, if any
        self._newest_evaluation: EvaluationOutcome | None = None  # the newest evaluation that succeeded
        self._first_step = self._saved_env_steps = driver.env_steps
        self._first_update = self.learner.learner_steps
        self._replay_checkpoint_every = replay_checkpoint_every
        self._replay_saved_env_steps = driver.env_steps if driver.has_replay else 0
        self._row_schedule = Schedule(experiment.row_every, self._first_step)
        self._evaluation_schedule = Schedule(experiment.eval_every, self._first_step)
        self._checkpoint_schedule = Schedule(experiment.checkpoint_every, self._first_step)

    def run(self) -> int | None:
        """Train until the session's last step or a signal. Then save, evaluate, and write the result.

        Returns:
            The number of the signal that ended the run, or None.
        """
        session, self._thread_id = self._session, threading.get_ident()
        self._counts = ActorCounts()
        self._counts.add(self.driver.stats())
        self._rows = RowWriter(session, self._first_step, self._counts)
        try:
            with self._stop:
                evaluation = self._train_and_evaluate()
        except KeyboardInterrupt:
            if self._saved_env_steps == self.driver.env_steps:
                raise
            raise ForcedExitError(
                f"The run was interrupted before it could save. {self._directory.describe_checkpoint()}"
            ) from None
        finally:
            self._rows.close()
        env_steps, number = self.driver.env_steps, self._stop.number
        stopped_by = session.last_step_reason if env_steps >= session.until else self._early_stop.by or "interrupt"
        learned = {"learner_steps": self.learner.learner_steps, "params_version": self.learner.params_version}
        self._directory.write_result(self._rows.result(env_steps, learned, evaluation, stopped_by, signal=number))
        return number

    def end(self, by: str, evaluate: bool = True) -> None:
        """End `run()` after the current step. Any thread can call this. See `EarlyStop.request` for the arguments."""
        self._early_stop.request(by, evaluate)

    def save_soon(self) -> None:
        """Save a checkpoint: in the thread of `run` at once, in another thread before the next steps."""
        if threading.get_ident() == self._thread_id:
            self._save(final=False)
        else:
            self._save_requested.set()

    def stats(self) -> dict[str, Any]:
        """Return the number of updates, as in `Learner.stats`."""
        return {"learner_steps": self.learner.learner_steps}

    def stop(self) -> None:
        """Do nothing, because signals end the loop."""

    def close(self) -> None:
        """Close the environments and the learner."""
        self.driver.close()

    def _train_and_evaluate(self) -> EvaluationOutcome:
        """Train until the session ends, then save and evaluate. After a signal, do not evaluate."""
        profile, trace_dir = self._session.profile, self._directory.path / "trace"
        if self._experiment.topology_config.evaluates:
            self._evaluations.compile_ahead()
        import_late_modules()
        self._rows.record_step(self._first_step)
        try:
            with contextlib.nullcontext() if profile is None else profile.measure(self.driver, trace_dir):
                self._train(self._session.until)
        except EnvError:
            self._save_all(with_envs=False, final=True)
            raise
        self._rows.record_step(self.driver.env_steps)
        self._write_row()
        if self._stop.is_repeated:
            raise KeyboardInterrupt
        self._save(final=True)
        if self._stop.number is not None or not self._early_stop.evaluates:
            return EvaluationOutcome(self.driver.env_steps)
        num_envs = self._experiment.num_envs
        warn_if_no_updates(self.driver.spec, self.learner.learner_steps, self.driver.env_steps, num_envs)
        if not self._experiment.topology_config.evaluates:
            return EvaluationOutcome(self.driver.env_steps)
        return self._evaluate(final=True)

    def _train(self, until: int) -> None:
        """Make steps and updates, and run due tasks. Stop at the step `until`, a signal or a limit."""
        driver, stop, progress = self.driver, self._stop, self._session.progress
        shown, due = time.monotonic(), self._next_due()
        now, has_learned = driver.env_steps, False
        while now < until and stop.number is None and not self._must_end():
            self._learner_logs = driver.advance(min(due, until), self._must_end) or self._learner_logs
            now = driver.env_steps
            if self._learner_logs is not None and not has_learned:
                has_learned = True
                self._session.show("")
            if due <= now < until:  # at the last step, the caller runs all tasks
                self._run_due_tasks(now)
                due = self._next_due()
            if self._save_requested.is_set():
                self._save_requested.clear()
                self._save(final=False)
            if progress is not None and time.monotonic() - shown > _PROGRESS_SECONDS:
                shown = time.monotonic()
                progress.write(now, {})

    def _must_end(self) -> bool:
        return self._early_stop.check_limits(self.learner.learner_steps, self._rows.eval_return) is not None

    def _run_due_tasks(self, now: int) -> None:
        """Run each task (write a row, evaluate, save) if it is due."""
        if self._row_schedule.advance_to(now):
            self._write_row()
        began = time.monotonic()
        if self._evaluation_schedule.advance_to(now) and self._stop.number is None:
            self._evaluate(final=False)
        if self._checkpoint_schedule.advance_to(now):
            self._save(final=False)
        self._rows.exclude(time.monotonic() - began)

    def _next_due(self) -> float:
        """Return the step at which the next task is due."""
        return min(self._row_schedule.due, self._evaluation_schedule.due, self._checkpoint_schedule.due)

    def _write_row(self) -> None:
        self._counts.add(self.driver.stats())
        self._rows.write(self.driver.env_steps, self._counts, self._values)

    def _values(self) -> dict[str, Any]:
        # Transfers from the device are slow, so fetch only the logs of the newest update, and only for a row.
        logs, self._learner_logs = self._learner_logs or {}, None
        return {
            **as_numbers(logs),
            "learner_steps": self.learner.learner_steps,
            "params_version": self.learner.params_version,
            # `Learner.stats` uses the same names
            **{f"replay_{name}": value for name, value in self.driver.replay_stats().items()},
        }

    def _evaluate(self, *, final: bool) -> EvaluationOutcome:
        """Evaluate the policy, save it, and write the row of the evaluation. A signal ends the evaluation."""
        now = self.driver.env_steps
        if self._newest_evaluation is not None and self._newest_evaluation.step == now:
            return self._newest_evaluation
        evaluate = functools.partial(self._evaluations.evaluate, self.driver.free_envs if final else None)
        try:
            with self._stop.interruptible(self._evaluations.stop):
                outcome = try_evaluation(evaluate, now, final=final)
        except (KeyboardInterrupt, StoppedError):
            if self._stop.number is None:  # the error does not come from a signal
                raise
            return EvaluationOutcome(now)
        if outcome.values is not None:
            self._newest_evaluation = outcome
            if not final:
                self._save(final=False)
            if self._saved_env_steps == now:
                newest = Checkpointer(self._directory.checkpoints).existing(None)
                BestCheckpoint(self._directory.checkpoints).offer(newest, outcome.values["return_mean"])
            self._rows.log_evaluation(now, evaluation_row(outcome.values))
        return outcome

    def _save(self, *, final: bool) -> None:
        """Write a checkpoint if there are new steps. If this fails, raise if `final`, and otherwise only warn."""
        now = self.driver.env_steps
        is_first = now == self._first_step and self.learner.learner_steps == self._first_update
        if self.learner.restored is not None and is_first:
            return  # the checkpoint from which this session was restored is still the newest state
        if now == self._saved_env_steps and not final:
            return
        try:
            self._save_all(with_envs=True, final=final)
        except CheckpointError as error:
            if final:
                raise CheckpointError(f"{error} {self._directory.describe_checkpoint()}") from error
            _log.warning("%s The run continues, and saves again at the next checkpoint.", error)

    def _save_all(self, *, with_envs: bool, final: bool) -> None:
        """Write a checkpoint of everything.

        Args:
            with_envs: Save the environments. If False, a resumed run resets them. False after an environment failed.
            final: True for the last checkpoint of the session. It contains the replay buffer, even a large one.
        """
        driver, every = self.driver, self._replay_checkpoint_every
        now = driver.env_steps
        is_due = final or (every > 0 and now - self._replay_saved_env_steps >= every)
        with_replay = driver.replay_is_saved and (is_due or driver.replay_is_small)
        self.learner.save(driver.get_state(with_envs=with_envs), final=final, with_replay=with_replay)
        self._saved_env_steps, self._replay_saved_env_steps = now, now if with_replay else self._replay_saved_env_steps
