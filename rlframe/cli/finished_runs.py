"""`rlframe evaluate`, `rlframe plot` and `rlframe bench`: evaluate policies, draw learning curves, measure speed."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import sys
from typing import Annotated, Any, Union

import tyro

import rlframe
from rlframe import extras
from rlframe.cli.parsing import CommandOptions, parse
from rlframe.errors import UsageError
from rlframe.metrics.terminal import format_number, plus_minus

_EVALUATE = "Play episodes with a checkpoint of a run, without exploration."
_PLOT = (
    "Draw the learning curves of runs, one panel per environment. Runs that differ only by their seed become one line. "
    "With four or more seeds, the line is the interquartile mean and the band is its 95% confidence interval "
    "(bootstrap over the seeds). With two or three seeds, the line is the mean and the band goes from the lowest to "
    "the highest value."
)


@dataclasses.dataclass(frozen=True)
class EvaluateOptions(CommandOptions):
    """Options of `rlframe evaluate`."""

    run_dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]  # directory of the run
    # name of a checkpoint, or best: the one whose evaluation had the highest return; None means the newest one
    checkpoint: Union[str, None] = None
    episodes: int = 20  # number of episodes to play
    num_envs: Union[int, None] = None  # number of environments; None means as many as in the run's own evaluations
    # maximum steps of an episode; a longer episode is an error; None means the run's limit
    max_episode_length: Union[int, None] = None
    seed: Union[int, None] = None  # seed of the environments; None means the run's seed, as in its own evaluations
    video: Union[str, None] = None  # also write a video of one episode to this file (.mp4, .mkv, .webm)
    json: bool = False  # print the result as one JSON object in the last line of stdout


def evaluate(arguments: list[str]) -> int:
    """Run `rlframe evaluate` and return its exit code."""
    options = parse(EvaluateOptions, arguments, "rlframe evaluate", _EVALUATE)
    for name in ("episodes", "num_envs", "max_episode_length"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")
    # User code may change the working directory, so make the paths absolute first.
    options = dataclasses.replace(options, run_dir=os.path.abspath(options.run_dir))
    if options.video is not None:
        extras.require("--video", "gymnasium")
        options = dataclasses.replace(options, video=os.path.abspath(options.video))
    from rlframe.programs.experiment import MAX_SEED

    if options.seed is not None and not 0 <= options.seed <= MAX_SEED:
        raise UsageError(f"--seed must be between 0 and {MAX_SEED}, got {options.seed}.")
    from rlframe.programs.policies import evaluation
    from rlframe.programs.policies.saved import parse_checkpoint

    checkpoint = None if options.checkpoint is None else parse_checkpoint(options.checkpoint, "--checkpoint")
    limit = options.max_episode_length
    result = evaluation.evaluate(
        options.run_dir,
        checkpoint=checkpoint,
        episodes=options.episodes,
        seed=options.seed,
        num_envs=options.num_envs,
        max_episode_length=limit,
    )
    names = ("return_mean", "return_std", "episodes", "length_mean", "params_version")
    values: dict[str, Any] = {name: result[name] for name in names}
    values["run_dir"] = options.run_dir
    print(
        f"return {format_number(values['return_mean'])}{plus_minus(values['return_std'], values['episodes'])} "
        f"over {values['episodes']} episodes of {format_number(values['length_mean'])} steps",
        file=sys.stderr,
    )
    if options.video is not None:
        filmed = evaluation.record(
            options.run_dir,
            options.video,
            checkpoint=checkpoint,
            seed=options.seed,
            max_episode_length=limit,
        )
        values["video"] = options.video
        print(
            f"{options.video}: return {format_number(filmed['return_mean'])}, {filmed['frames']} frames",
            file=sys.stderr,
        )
    if options.json:
        print(json.dumps(values))
    return 0


@dataclasses.dataclass(frozen=True)
class PlotOptions(CommandOptions):
    """Options of `rlframe plot`."""

    run_dirs: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="RUN_DIR...", help="directories of runs, of `train --seeds`, or of sweeps"),
    ]
    # output file (.png, .svg or .pdf); None means learning_curve.png, inside RUN_DIR if only one is given
    out: Union[str, None] = None


def plot(arguments: list[str]) -> int:
    """Run `rlframe plot` and return its exit code."""
    options = parse(PlotOptions, arguments, "rlframe plot", _PLOT)
    if not options.run_dirs:
        raise UsageError("Name one or more run directories. See `rlframe plot --help`.")
    from rlframe.metrics import plot_learning_curve
    from rlframe.programs.run_dir.directory import RunDir

    runs: list[pathlib.Path] = []
    for directory in map(RunDir, options.run_dirs):
        begun = [run for run in directory.runs() if RunDir(run).metrics.exists()]
        runs += begun or [directory.path]
    out = options.out
    if out is None and len(options.run_dirs) == 1:
        out = os.fspath(RunDir(options.run_dirs[0]).learning_curve)
    print(plot_learning_curve(runs, out))
    return 0


def bench(arguments: list[str]) -> int:
    """Run `rlframe bench` and return its exit code. The benchmarks are in the source checkout of rlframe."""
    root = pathlib.Path(rlframe.__file__).parent.parent
    if not (root / "benchmarks" / "runner.py").is_file():
        raise UsageError("`rlframe bench` needs a checkout of rlframe: the package does not contain the benchmarks.")
    sys.path.insert(0, str(root))
    return importlib.import_module("benchmarks.runner").main(arguments) or 0
