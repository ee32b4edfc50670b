"""One session of `rlframe train`: loggers, the run, its picture, its result."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

from rlframe import extras
from rlframe.cli.tables import plus_minus
from rlframe.cli.train import SessionOptions
from rlframe.errors import UsageError
from rlframe.metrics import Logger, TrackioLogger, WandbLogger
from rlframe.programs.api import progress_of
from rlframe.programs.control import Control
from rlframe.programs.experiment import Experiment
from rlframe.programs.jsonable import to_jsonable
from rlframe.programs.presets import Preset
from rlframe.programs.profile import Profile
from rlframe.programs.run_dir import Result, RunDir, default_path
from rlframe.programs.session import check_extras, train
from rlframe.programs.topologies.parts import make_agent
from rlframe.programs.updates import check_updates


def run_session(experiment: Experiment, session: SessionOptions, preset: Preset | None) -> int:
    """Trains as asked, draws the learning curve, prints the result; returns the exit code."""
    _check_trackers(session)
    directory = RunDir(session.run_dir if session.run_dir is not None else default_path(experiment))
    if not experiment.topology.engine_class.in_process:
        _leave_accelerators_to_the_learner()
    profile = None
    if session.profile or session.profile_trace:
        profile = Profile(os.fspath(directory.path / "trace") if session.profile_trace else None)
    progress = None if session.quiet else progress_of(experiment, session.stop_at)
    try:
        result = train(
            experiment,
            run_dir=directory.path,
            resume=session.resume,
            resume_from=session.resume_from,
            take_over=session.take_over,
            stop_at=session.stop_at,
            open_loggers=lambda path: _trackers(experiment, session, path),
            progress=progress,
            profile=profile,
            notes={"preset": preset.name if preset is not None else None},
            listen=session.listen,
            control=_control(experiment, session),
        )
    finally:
        if progress is not None:
            progress.close()
    if profile is not None:
        _print_profile(profile)
    if not session.quiet:
        _print_result(experiment, result, directory)
    if session.json:
        print(json.dumps(result.to_json()), flush=True)
    if result.signal is not None:
        return 128 + result.signal
    return 0 if result.evaluation_error is None else 1


def check_begins(experiment: Experiment, session: SessionOptions) -> None:
    """Raise, for who starts runs in processes of their own, what a run would before its first step."""
    _check_trackers(session)
    check_extras(experiment, with_control=_control(experiment, session) is not None)
    _leave_accelerators_to_the_learner()
    check_updates(experiment, make_agent(experiment))


def _check_trackers(session: SessionOptions) -> None:
    for tracker in ("wandb", "trackio"):
        if getattr(session, tracker):
            extras.require(f"--{tracker}", tracker)


def _control(experiment: Experiment, session: SessionOptions) -> Control | None:
    """Where the run is shown over HTTP."""
    port = session.http
    if port == "auto":
        port = None if experiment.topology.control is None else 0
    if port is not None:
        return Control(session.http_host, port, session.token_file)
    for name in ("http_host", "token_file"):
        if getattr(session, name) != getattr(SessionOptions, name):
            raise UsageError(f"{name} is of the HTTP service of the run, and there is none: give it a port by --http.")
    return None


def _leave_accelerators_to_the_learner() -> None:
    # This process only looks at what the agent is made of: without this JAX would take the accelerator's memory.
    import jax

    jax.config.update("jax_platforms", "cpu")


def _trackers(experiment: Experiment, session: SessionOptions, path: pathlib.Path) -> list[Logger]:
    config: dict[str, Any] = to_jsonable(experiment)
    loggers: list[Logger] = []
    if session.wandb:
        loggers.append(WandbLogger(path, project=session.project, config=config))
    if session.trackio:
        loggers.append(TrackioLogger(path, project=session.project, config=config))
    return loggers


def _print_result(experiment: Experiment, result: Result, directory: RunDir) -> None:
    if result.evaluation is not None and experiment.topology.learns_from != "steps":
        values = ", ".join(f"{name} {value:.3f}" for name, value in result.evaluation.items()) or "nothing evaluated"
        text = (
            f"{values} after {result.learner_steps:,} learner steps from {result.env_steps:,} sequences, "
            f"{result.steps_per_second:,.1f} sequences/s, {result.wall_seconds:.1f} s; see {directory.learning_curve}"
        )
    elif result.return_mean is None and result.signal is None:
        text = (
            f"not evaluated, {result.env_steps:,} steps, {result.steps_per_second:,.0f} steps/s, "
            f"{result.wall_seconds:.1f} s; see {directory.learning_curve}"
        )
    elif result.return_mean is None:
        text = f"stopped at {result.env_steps:,} steps; everything is saved. Go on: "
        text += f"rlframe train --resume --run-dir {directory.path}"
    else:
        text = (
            f"return {result.return_mean:.1f}{plus_minus(result.return_std, result.episodes)} "
            f"over {result.episodes} episodes, "
            f"{result.env_steps:,} steps, {result.steps_per_second:,.0f} steps/s, {result.wall_seconds:.1f} s; "
            f"see {directory.learning_curve}"
        )
    print(text, file=sys.stderr)


def _print_profile(profile: Profile) -> None:
    from rich.table import Table

    from rlframe.cli.tables import console

    table = Table(title="where the time went", title_justify="left", box=None, pad_edge=False)
    table.add_column("part")
    for column in ("calls", "seconds", "us per call", "share"):
        table.add_column(column, justify="right")
    for line in profile.lines():
        table.add_row(
            line.name,
            f"{line.calls:,}",
            f"{line.seconds:.2f}",
            f"{line.microseconds_per_call:.0f}",
            f"{line.share:.1%}",
        )
    console(sys.stderr).print(table)
