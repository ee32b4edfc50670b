"""`rlframe.train`: a run from a script or a notebook, with the options of the command line."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from rlframe import streams
from rlframe.errors import UsageError, suggest
from rlframe.metrics import TerminalLogger
from rlframe.programs import session
from rlframe.programs.callbacks import Callback
from rlframe.programs.experiment import Experiment, flat, load_experiment, make_experiment, with_fields
from rlframe.programs.run_dir import Result
from rlframe.programs.user_files import forget_changed


def train(
    agent: str = "ppo",
    env: str | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    stop_at: int | None = None,
    callbacks: Iterable[Callback] = (),
    quiet: bool = False,
    **options: Any,
) -> Result:
    """Train an agent to its last step, and evaluate what it has learned: `rlframe train`, from Python.

    Args:
        agent: a name that `rlframe agents` lists, or `file.py:Class`.
        env: a name that `rlframe envs` lists, or `file.py:make_env`; None: the agent's default, as CartPole-v1.
        run_dir: where everything is written; None: a new directory under `runs/`.
        resume: go on with the run in `run_dir`, whatever agent and environment that has, from its newest checkpoint.
        stop_at: the step at which to stop and save; schedules still end at `steps`.
        callbacks: each is called as `callback(info)` with each row of the logs: `info.step`, `info.values` (name ->
            number), `info.stop()`, which ends the run early. If one raises, the run saves everything and ends, and the
            exception is raised from here. See docs/api.md.
        quiet: show no progress.
        **options: those of `rlframe train`, with underscores: `steps=50_000`, `seed=2`, `num_envs=16`,
            `topology="heavy_env"`, `preset="none"`, `learning_rate=1e-3`. What is not given is the preset's.

    Returns:
        How it ended: `return_mean`, `run_dir`, `env_steps` and others.

    Raises:
        UsageError: an option is unknown or does not fit.
        RlframeError: the run failed; what was saved is kept.
    """
    streams.prepare()
    if run_dir is not None:
        run_dir = os.path.abspath(run_dir)  # before any code of the user's, which may change the directory
    for name, given in (("agent", agent), ("env", env)):
        if given is not None and not isinstance(given, str):
            raise UsageError(f"{name} is a name, or file.py:NAME of what is in a file of yours; got {given!r}.")
    if not resume:
        experiment = make_experiment(agent, env, **options)
    elif run_dir is None:
        raise UsageError("resume needs run_dir: the directory of the run to go on with.")
    else:
        forget_changed()
        experiment = _changed(load_experiment(run_dir), options)
    progress = None if quiet else progress_of(experiment, stop_at)
    try:
        return session.train(
            experiment, run_dir=run_dir, resume=resume, stop_at=stop_at, callbacks=callbacks, progress=progress
        )
    finally:
        if progress is not None:
            progress.close()


def progress_of(experiment: Experiment, stop_at: int | None) -> TerminalLogger:
    """What shows a session's progress to a person."""
    until = min(stop_at or experiment.steps, experiment.steps)
    title = f"{experiment.agent.rpartition(':')[2]} on {experiment.env}"
    return TerminalLogger(until + experiment.topology.steps_before(experiment), title=title)


def _changed(saved: Experiment, options: dict[str, Any]) -> Experiment:
    known = flat(saved)
    for name in options:
        if name not in known:
            raise UsageError(f"{name} cannot be changed in a run that goes on.{suggest(name, known)}")
    return with_fields(saved, **options)
