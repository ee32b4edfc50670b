"""The loop of a run in one process, with logs, evaluations and checkpoints around it."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from typing import Any

import numpy as np

from rlframe.actors import Actor
from rlframe.engines.stopping import StopSignal
from rlframe.errors import CheckpointError, CutShortError, EnvError
from rlframe.inferencers import Inferencer
from rlframe.learners import Learner
from rlframe.metrics.rows import ActorCounts, evaluation_row
from rlframe.programs.policies.evaluation import Evaluations, try_evaluation
from rlframe.programs.session import Ending, Schedule, Session
from rlframe.programs.training.row_writer import RowWriter
from rlframe.programs.training.updates import warn_if_none
from rlframe.replay.replay_files import ReplayFiles
from rlframe.types import Logs

_log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 0.25


class TrainingLoop:
    """Steps an actor and a learner in turn: one session of a run, from its start or a checkpoint to its stop.

    Checkpoints of the learner hold the state of the actor (with its environments) and of the inferencer. If the learner
    was restored from one, the loop continues with them.

    Args:
        session: the session.
        env_builder: of the actor's pool.
        inferencer, replay_buffer, learner: objects of this process; they are closed with the loop.
        replay_checkpoint_every: steps between two saves of a replay that is too large to go into each checkpoint; 0:
            only the last checkpoint has it.

    Attributes:
        actor: made from these parts.
        pool: its environments.
    """

    actor: Actor
    pool: Any

    def __init__(
        self,
        session: Session,
        env_builder: Any,
        inferencer: Inferencer,
        replay_buffer: Any,
        learner: Learner,
        replay_checkpoint_every: int,
    ) -> None:
        self.inferencer, self.replay_buffer, self.learner = inferencer, replay_buffer, learner
        self._session, self._directory, self._env_builder = session, session.directory, env_builder
        experiment = self._experiment = session.experiment
        self._evaluations = Evaluations(experiment, session.agent, learner)
        self._stop, self._ending = StopSignal(session.quiet), Ending(session)
        spec = replay_buffer.spec
        self._learns_once = spec.samples_per_insert is None and spec.kind != "queue"
        self._evaluation_error: str | None = None  # why the final evaluation failed
        self._learner_logs: Logs | None = None  # of the newest update since the last row
        self._replay_checkpoint_every, self._replay_saved_env_steps = replay_checkpoint_every, 0
        self._evaluated: tuple[int, Logs] | None = None  # (environment steps, values) of the newest evaluation
        self._stopped_by = "interrupt"
        self._resumed = learner.restored is not None
        if session.resumes and not self._resumed:
            _log.warning("The run in %s ended before its first checkpoint: it starts again.", self._directory.path)
        try:
            self._make_actor()
        except BaseException:
            if hasattr(self, "actor"):
                self.actor.close()
            raise
        self._first_step = self._saved_env_steps = self.actor.env_steps
        steps_between = experiment.row_every, experiment.eval_every, experiment.checkpoint_every
        self._rows_due, self._evaluations_due, self._checkpoints_due = self._schedules = [
            Schedule(every, self._first_step) for every in steps_between
        ]

    def _make_actor(self) -> None:
        """Make the Actor: a new one, or the one of the checkpoint that the learner was restored from."""

        def build(seed: int) -> Any:
            self.pool = self._env_builder(seed=seed)
            return self.pool

        make = functools.partial(Actor, build, self.inferencer, self.replay_buffer, seed=self._experiment.seed)
        if self.learner.restored is None:
            self.actor = make()
            return
        saved, has_replay = self.learner.restored
        self.inferencer.set_state(saved["inferencer"])
        if has_replay and saved["actor"]["env"] is not None:
            # The environments continue in mid-episode, and so do the fragments that they have open in the buffer.
            self.actor = make(rank=0, incarnation=saved["incarnation"])
        else:
            # The same rank, its next incarnation: open fragments are dropped, and seeds are new.
            while self.replay_buffer.claim_rank(rank=0)[1] < saved["incarnation"]:
                pass
            self.actor = make(rank=0)
        self.actor.set_state(saved["actor"])
        self._replay_saved_env_steps = self.actor.env_steps if has_replay else 0

    def run(self) -> int | None:
        """Train until the session's last step or a signal, saves, evaluates, and writes the result.

        Returns:
            The number of the signal that ended it, or None.
        """
        session = self._session
        self._counts = ActorCounts()
        self._counts.add(self.actor.stats())
        self._rows = RowWriter(session, self._first_step, self._counts)
        try:
            with self._stop:
                evaluation = self._to_end()
        except KeyboardInterrupt:
            if self._saved_env_steps == self.actor.env_steps:
                raise
            raise CutShortError(f"Cut short before it had saved. {self._directory.what_is_saved()}") from None
        finally:
            self._rows.close()
        learned = {"learner_steps": self.learner.learner_steps, "params_version": self.learner.params_version}
        number, error = self._stop.number, self._evaluation_error if evaluation is None else None
        result = self._rows.result(
            self.actor.env_steps,
            learned,
            evaluation,
            self._stopped_by,
            signal=number,
            evaluation_error=None if number else error,
        )
        self._directory.write_result(result)
        return number

    def end(self, by: str, evaluate: bool = True) -> None:
        """End `run()` after the step under way, as at its last step. Any thread may call it; see `Ending.ask`."""
        self._ending.ask(by, evaluate)

    def stop(self) -> None:
        """Do nothing: signals end the loop."""

    def close(self) -> None:
        """Close the environments and the learner."""
        self.actor.close()
        self.learner.close()

    def _to_end(self) -> Logs | None:
        """Train to the end, save and evaluate. Return the evaluation; None after a signal, or if none is wanted."""
        profile = self._session.profile
        self._rows.note_step(self._first_step)
        try:
            with contextlib.nullcontext() if profile is None else profile.measures(self):
                self._loop(self._session.until)
        except EnvError:
            self._save_all(with_envs=False, final=True)
            raise
        if self._stop.number is None:
            is_over = self.actor.env_steps >= self._session.until
            self._stopped_by = self._session.last_step_reason if is_over else self._ending.by or "interrupt"
        self._rows.note_step(self.actor.env_steps)
        self._write_row()
        if self._stop.is_repeated:
            raise KeyboardInterrupt
        self._save(final=True)
        if self._stop.number is not None or not self._ending.evaluates:
            return None
        spec, num_envs = self.replay_buffer.spec, self._experiment.num_envs
        warn_if_none(spec, self.learner.learner_steps, self.actor.env_steps, num_envs)
        return self._evaluate(final=True) if self._experiment.topology_config.evaluates else None

    def _loop(self, until: int) -> None:
        actor, stop, progress = self.actor, self._stop, self._session.progress
        shown = time.monotonic()
        due = min(each.due for each in self._schedules)
        now = actor.env_steps
        while now < until and stop.number is None and not self._ending.is_due(self.learner.learner_steps):
            actor.step()
            update = self._learn()
            if update is not None:
                self._learner_logs = update
            now = actor.env_steps
            if now >= due:
                self._periodic(now, until)
                due = min(each.due for each in self._schedules)
            if progress is not None and time.monotonic() - shown > _PROGRESS_SECONDS:
                shown = time.monotonic()
                progress.write(now, {})

    def _learn(self) -> Logs | None:
        """Make the updates that are due: of a queue until it is empty, of others as `samples_per_insert` allows."""
        logs, batch = None, self.replay_buffer.sample()
        while batch is not None:
            logs = self.learner.step(batch)
            is_last = self._learns_once or self._ending.is_due(self.learner.learner_steps)
            batch = None if is_last else self.replay_buffer.sample()
        return logs

    def _periodic(self, now: int, until: int) -> None:
        if self._rows_due.is_due(now):
            self._write_row()
        if now >= until:  # what follows is done at the end in any case
            return
        began = time.monotonic()
        if self._evaluations_due.is_due(now):
            self._evaluate(final=False)
        if self._checkpoints_due.is_due(now):
            self._save(final=False)
        self._rows.exclude(time.monotonic() - began)

    def _write_row(self) -> None:
        self._counts.add(self.actor.stats())
        self._rows.write(self.actor.env_steps, self._counts, self._values)

    def _values(self) -> dict[str, Any]:
        # Only the newest update's logs are fetched from the device, and only here.
        logs, self._learner_logs = self._learner_logs or {}, None
        return {
            **{name: float(np.asarray(value).reshape(())) for name, value in logs.items()},
            "learner_steps": self.learner.learner_steps,
            "params_version": self.learner.params_version,
            **{f"replay_{name}": value for name, value in self.replay_buffer.stats().items()},  # as `Learner.stats`
        }

    def _evaluate(self, *, final: bool) -> Logs | None:
        """Evaluate the policy, which is saved before the row of the evaluation is written.

        Return None if it failed, or if a signal ended it.
        """
        if self._evaluated is not None and self._evaluated[0] == self.actor.env_steps:
            return self._evaluated[1]
        evaluate = functools.partial(self._evaluations.evaluate, self.actor.close if final else None)
        try:
            with self._stop.interruptible():
                values, problem = try_evaluation(evaluate, self.actor.env_steps, final=final)
        except KeyboardInterrupt:
            if self._stop.number is None:  # it came from elsewhere
                raise
            return None
        if values is None:
            self._evaluation_error = problem if final else None
            return None
        self._evaluated = self.actor.env_steps, values
        if not final:
            self._ending.note_evaluation(values["return_mean"])
            self._save(final=False)
        self._rows.log(self.actor.env_steps, evaluation_row(values))
        return values

    def _save(self, *, final: bool) -> None:
        now = self.actor.env_steps
        if self._resumed and now == self._first_step:
            return  # nothing has happened since the checkpoint that this session began with
        if now == self._saved_env_steps and not final:
            return
        try:
            self._save_all(with_envs=True, final=final)
        except CheckpointError as error:
            if final:
                raise CheckpointError(f"{error} {self._directory.what_is_saved()}") from error
            _log.warning("%s The run goes on; the next checkpoint is another try.", error)

    def _save_all(self, *, with_envs: bool, final: bool) -> None:
        """Write a checkpoint of everything.

        Args:
            with_envs: False if the environments have failed: a resumed run resets them.
            final: nothing follows in this session. Then a large replay is saved too.
        """
        now, every = self.actor.env_steps, self._replay_checkpoint_every
        is_due = final or (every > 0 and now - self._replay_saved_env_steps >= every)
        can_save = self.replay_buffer.is_saved_by_learner  # else a resumed run fills it again
        with_replay = can_save and (is_due or ReplayFiles.is_small(self.replay_buffer))
        extras = {
            "actor": self.actor.get_state(with_envs=with_envs),
            "incarnation": self.actor.incarnation,
            "inferencer": self.inferencer.get_state(),
        }
        self.learner.save(extras, final=final, with_replay=with_replay)
        self._saved_env_steps, self._replay_saved_env_steps = now, now if with_replay else self._replay_saved_env_steps
