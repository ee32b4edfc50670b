"""Everything in one process: the loop of the design document, with logs, evaluation and checkpoints around it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from rlframe.engines import logs
from rlframe.engines.base import node_status
from rlframe.engines.stopping import StopSignal
from rlframe.errors import CheckpointError, CutShortError, EnvError
from rlframe.metrics import CallbackLogger, Logger, MultiLogger, plot_learning_curve
from rlframe.programs import run_checkpoint
from rlframe.programs.assemble import Evaluations, Parts, assemble
from rlframe.programs.control import Control, serve_control_of
from rlframe.programs.experiment import Experiment
from rlframe.programs.profile import Profile
from rlframe.programs.run_dir import Result, RunDir, open_session
from rlframe.programs.run_status import StatusFile
from rlframe.programs.updates import first_update, say_updates
from rlframe.programs.window import Window
from rlframe.types import Logs

_log = logging.getLogger(__name__)

Callback = Callable[[int, dict[str, Any]], Any]

_PROGRESS_SECONDS = 0.25


def train(
    described: Experiment,
    *,
    run_dir: str | os.PathLike | None = None,
    resume: bool = False,
    resume_from: int | None = None,
    take_over: bool = False,
    stop_at: int | None = None,
    callback: Callback | None = None,
    open_loggers: Callable[[pathlib.Path], Iterable[Logger]] | None = None,
    progress: Logger | None = None,
    profile: Profile | None = None,
    notes: dict[str, Any] | None = None,
    control: Control | None = None,
) -> Result:
    """See `rlframe.programs.train`."""
    session = open_session(described, run_dir, resume, stop_at, take_over, resume_from)
    with (
        session as (described, directory),
        logs.kept(directory.logs, "train"),
        StopSignal() as stop,
        contextlib.ExitStack() as served,
        contextlib.ExitStack() as undo,
    ):
        if not resume:
            undo.callback(directory.remove)  # until training has begun
            directory.write_config(described, notes or {})  # first: a run that is killed early can be resumed
        parts = assemble(described, str(directory.checkpoints))
        run = _Run(described, directory, parts, stop, progress, profile)
        try:
            if not resume:
                say_updates(described, parts.agent.replay_spec, progress)
            run.start(resume)
            more = list(open_loggers(directory.path)) if open_loggers is not None else []
            run.open_loggers([*more, *([CallbackLogger(callback)] if callback else [])])
            if resume:
                directory.write_config(described, notes or {})
            served.enter_context(serve_control_of(directory.path, control))
            undo.pop_all()
            until = min(described.steps, stop_at or described.steps)
            status = StatusFile(directory, described, until)
            status.watch(False, [node_status("train", 0, os.getpid())])
            with status.until_the_end():
                result = run.to_end(until)
        except KeyboardInterrupt:
            if run.is_saved:
                raise
            raise CutShortError(f"Cut short before it had saved. {directory.what_is_saved()}") from None
        finally:
            run.close()
        directory.write_result(result.to_json())
        status.end(result)
        plot_learning_curve(directory.path, directory.learning_curve)
        return result


class _Run:
    """One session of a run: from its start, or a checkpoint, to its stop."""

    def __init__(
        self,
        described: Experiment,
        directory: RunDir,
        parts: Parts,
        stop: StopSignal,
        progress: Logger | None,
        profile: Profile | None,
    ) -> None:
        self._described = described
        self._directory = directory
        self._parts = parts
        self._stop = stop
        self._progress = progress
        self._profile = profile
        self._logger: Logger = MultiLogger([])
        self._evaluations = Evaluations(described, parts.agent, parts.learner)
        spec = parts.replay_buffer.spec
        self._learns_once = spec.samples_per_insert is None and spec.kind != "queue"
        self._began = time.monotonic()
        self._not_training = 0.0
        self._replay_saved_at = 0
        self._saved_at: int | None = None  # environment steps; None: the run has not begun

    @property
    def is_saved(self) -> bool:
        """Whether all steps are in a checkpoint."""
        return self._saved_at is None or self._saved_at == self._actor.env_steps

    def start(self, resume: bool) -> None:
        """Makes the Actor, or takes everything over from the latest checkpoint."""
        self._continues_files = resume
        if resume and not run_checkpoint.exists(self._directory):
            _log.warning("The run in %s ended before its first checkpoint: it starts again.", self._directory.path)
            resume = False
        self._resumed = resume
        if resume:
            self._replay_saved_at = run_checkpoint.restore(self._parts, self._described, self._directory)
        else:
            self._parts.make_actor(self._described.seed)
        assert self._parts.actor is not None
        self._actor = self._parts.actor
        if self._profile is not None:
            self._profile.attach(self._parts)
        self._first_step = self._saved_at = self._actor.env_steps
        self._window = Window(self._first_step)
        self._due = {
            "row": self._next(self._described.row_every),
            "evaluation": self._next(self._described.eval_every),
            "checkpoint": self._next(self._described.checkpoint_every),
        }

    def open_loggers(self, more: list[Logger]) -> None:
        """Opens the files of the run directory; on resume, rows after the checkpoint go."""
        at = self._first_step if self._continues_files else None
        shown = [self._progress] if self._progress is not None else []
        self._logger = MultiLogger([self._directory.open_logs(at), *shown, *more])

    def to_end(self, until: int) -> Result:
        """Trains until `until` environment steps or a signal, saves, evaluates."""
        began = time.monotonic()
        try:
            self._loop(until)
        except EnvError:
            run_checkpoint.save(self._parts, self._directory, with_envs=False, with_replay=True, final=True)
            raise
        finally:
            if self._profile is not None:
                self._profile.stop()
        seconds = time.monotonic() - began - self._not_training
        if self._actor.env_steps > self._window.first_step:
            self._write_row()
        self._save(final=True)
        if self._parts.learner.learner_steps == 0 and self._stop.number is None:
            self._say_nothing_was_learned()
        evaluation = self._evaluate() if self._stop.number is None else None
        if evaluation is None and self._stop.number is None:
            raise KeyboardInterrupt
        return self._result(evaluation, seconds)

    def close(self) -> None:
        """Closes all that was opened."""
        try:
            self._logger.close()
        finally:
            self._parts.close()

    def _loop(self, until: int) -> None:
        actor, window, stop = self._actor, self._window, self._stop
        shown = time.monotonic()
        due = min(self._due.values())
        now = actor.env_steps
        while now < until and stop.number is None:
            episodes = actor.step()
            if episodes is not None:
                window.add_episodes(episodes)
            update = self._learn()
            if update is not None:
                window.add_update(update)
            now = actor.env_steps
            if now >= due:
                self._periodic(now, until)
                due = min(self._due.values())
            if self._progress is not None and time.monotonic() - shown > _PROGRESS_SECONDS:
                shown = time.monotonic()
                self._progress.write(now, {})

    def _learn(self) -> Logs | None:
        """Takes the updates that are due: a queue's until it is empty, others' as `samples_per_insert` says."""
        learner, replay_buffer = self._parts.learner, self._parts.replay_buffer
        logs, batch = None, replay_buffer.sample()
        while batch is not None:
            logs = learner.step(batch)
            batch = None if self._learns_once else replay_buffer.sample()
        return logs

    def _say_nothing_was_learned(self) -> None:
        _log.warning(
            "No update was made in %d environment steps: the first one needs %d. Run for more steps, or let learning "
            "begin earlier.",
            self._actor.env_steps,
            first_update(self._parts.replay_buffer.spec, self._described.num_envs),
        )

    def _periodic(self, now: int, until: int) -> None:
        if now >= self._due["row"]:
            self._write_row()
            self._due["row"] = self._next(self._described.row_every)
        if now >= until:  # what follows is done at the end in any case
            return
        began = time.monotonic()
        if now >= self._due["evaluation"]:
            self._evaluate()
            self._due["evaluation"] = self._next(self._described.eval_every)
        if now >= self._due["checkpoint"]:
            self._save(final=False)
            self._due["checkpoint"] = self._next(self._described.checkpoint_every)
        seconds = time.monotonic() - began
        self._window.leave_out(seconds)
        self._not_training += seconds

    def _next(self, every: int) -> float:
        """The next multiple of `every` environment steps; never, where that is 0."""
        return (self._actor.env_steps // every + 1) * every if every else math.inf

    def _write_row(self) -> None:
        learner = self._parts.learner
        values = self._window.row(self._actor.env_steps, self._actor.logged)
        values["learner_steps"] = learner.learner_steps
        values["params_version"] = learner.params_version
        values["replay_items"] = self._parts.replay_buffer.size  # as `Learner.stats` names it
        values["wall_seconds"] = time.monotonic() - self._began
        self._logger.write(self._actor.env_steps, values)

    def _evaluate(self) -> Logs | None:
        self._stop.interruptible(True)
        try:
            values = self._evaluations.evaluate()
        except KeyboardInterrupt:
            return None
        finally:
            self._stop.interruptible(False)
        kept = {name: values[name] for name in ("return_mean", "return_std", "length_mean", "episodes")}
        self._logger.write(self._actor.env_steps, kept)
        return values

    def _save(self, *, final: bool) -> None:
        now = self._actor.env_steps
        if self._resumed and now == self._first_step:
            return  # nothing has happened since the checkpoint that this session began with
        every = self._described.replay_checkpoint_every
        with_replay = final or (every > 0 and now - self._replay_saved_at >= every)
        try:
            saved_replay = run_checkpoint.save(
                self._parts, self._directory, with_envs=True, with_replay=with_replay, final=final
            )
        except CheckpointError as error:
            if final:
                raise CheckpointError(f"{error} {self._directory.what_is_saved()}") from error
            _log.warning("%s The run goes on; the next checkpoint is another try.", error)
            return
        self._saved_at = now
        if saved_replay:
            self._replay_saved_at = now

    def _result(self, evaluation: Logs | None, seconds: float) -> Result:
        learner = self._parts.learner
        return Result(
            env_steps=self._actor.env_steps,
            learner_steps=learner.learner_steps,
            return_mean=evaluation["return_mean"] if evaluation else None,
            return_std=evaluation["return_std"] if evaluation else None,
            episodes=evaluation["episodes"] if evaluation else 0,
            steps_per_second=(self._actor.env_steps - self._first_step) / max(seconds, 1e-9),
            wall_seconds=time.monotonic() - self._began,
            params_version=learner.params_version,
            run_dir=str(self._directory.path),
            signal=self._stop.number,
        )
