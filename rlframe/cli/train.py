"""`rlframe train`: one run, or one run for each of `--seeds`."""

from __future__ import annotations

import json
import sys

from rlframe.cli.listings import print_preset
from rlframe.cli.parsing import raw_option_values
from rlframe.cli.train_options import TrainOptions, read_arguments
from rlframe.errors import UsageError
from rlframe.metrics.terminal import format_number, plus_minus
from rlframe.programs.experiment import Experiment
from rlframe.programs.presets import Preset
from rlframe.programs.run_dir.directory import Result, RunDir
from rlframe.streams import print_result


def run(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    import setproctitle

    experiment, options, preset = read_arguments(arguments)
    setproctitle.setproctitle("rlframe: train")
    if preset is not None and not options.quiet:
        print_preset(preset, experiment, sys.stderr)
    if options.seeds is None:
        if options.at_once is not None:
            raise UsageError(f"--at-once {options.at_once} needs --seeds: without it, there is only one run.")
        return _train_and_print(experiment, options, preset)
    if "seed" in raw_option_values(arguments):
        raise UsageError(f"--seeds {options.seeds} starts one run for each seed: leave --seed out.")
    from rlframe.cli.seeds import train_seeds

    return train_seeds(experiment, options)


def _train_and_print(experiment: Experiment, options: TrainOptions, preset: Preset | None) -> int:
    """Train, draw the learning curve, and print the result. Return the exit code."""
    import jax

    from rlframe.programs import api

    if not experiment.topology_config.engine_class.in_process:
        # Leave the accelerator's memory to the learner: this process only inspects the agent.
        jax.config.update("jax_platforms", "cpu")
    result = api.run_with_options(experiment, options, preset)
    if not options.quiet:
        _print_result(experiment, result)
    if options.json:
        print_result(json.dumps(result.to_json()))
    if result.signal is not None:
        return 128 + result.signal
    return 0 if result.evaluation_error is None else 1


def _print_result(experiment: Experiment, result: Result) -> None:
    directory = RunDir(result.run_dir)
    if result.evaluation is not None and experiment.topology_config.learns_from != "steps":
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
        text = (
            f"stopped at {result.env_steps:,} steps; everything is saved. Resume with: "
            f"rlframe train --resume --run-dir {directory.path}"
        )
    else:
        text = (
            f"return {format_number(result.return_mean)}{plus_minus(result.return_std, result.episodes)} "
            f"over {result.episodes} episodes, "
            f"{result.env_steps:,} steps, {result.steps_per_second:,.0f} steps/s, {result.wall_seconds:.1f} s; "
            f"see {directory.learning_curve}"
        )
    print(text, file=sys.stderr)
