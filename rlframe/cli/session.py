"""One session of `rlframe train`: loggers, the run, its picture, its result."""

from __future__ import annotations

import json
import sys

from rlframe.cli.tables import plus_minus
from rlframe.cli.train import TrainOptions
from rlframe.programs import api
from rlframe.programs.api import check_trackers, control_of
from rlframe.programs.experiment import Experiment
from rlframe.programs.presets import Preset
from rlframe.programs.run_dir import Result, RunDir
from rlframe.programs.session import check_extras
from rlframe.programs.topologies.parts import make_agent
from rlframe.programs.updates import check_updates


def run_session(experiment: Experiment, session: TrainOptions, preset: Preset | None) -> int:
    """Trains as asked, draws the learning curve, prints the result; returns the exit code."""
    if not experiment.topology.engine_class.in_process:
        _leave_accelerators_to_the_learner()
    result = api.run_session(experiment, session, preset)
    if not session.quiet:
        _print_result(experiment, result)
    if session.json:
        print(json.dumps(result.to_json()), flush=True)
    if result.signal is not None:
        return 128 + result.signal
    return 0 if result.evaluation_error is None else 1


def check_begins(experiment: Experiment, session: TrainOptions) -> None:
    """Raise, for who starts runs in processes of their own, what a run would before its first step."""
    check_trackers(session)
    check_extras(experiment, with_control=control_of(experiment, session) is not None)
    _leave_accelerators_to_the_learner()
    check_updates(experiment, make_agent(experiment))


def _leave_accelerators_to_the_learner() -> None:
    # This process only looks at what the agent is made of: without this JAX would take the accelerator's memory.
    import jax

    jax.config.update("jax_platforms", "cpu")


def _print_result(experiment: Experiment, result: Result) -> None:
    directory = RunDir(result.run_dir)
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
