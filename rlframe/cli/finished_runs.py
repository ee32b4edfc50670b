"""`rlframe evaluate`, `rlframe plot` and `rlframe bench`: how good finished runs are, and how fast runs are."""

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
from rlframe.metrics.curves import plus_minus

_EVALUATE = "Play episodes greedily with the latest checkpoint of a run."
_PLOT = (
    "Draw the learning curves of runs, one panel per environment. Runs that differ by their seed alone become one "
    "line, their interquartile mean, in the band that holds it with 95% confidence (bootstrap over the seeds); of two "
    "or three seeds their mean, in a band from the lowest to the highest."
)


@dataclasses.dataclass(frozen=True)
class EvaluateOptions(CommandOptions):
    """Options of `rlframe evaluate`."""

    run_dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]  # the run's directory
    episodes: int = 20
    num_envs: Union[int, None] = None  # environments to build; None: as the run's own evaluations do
    max_episode_length: Union[int, None] = None  # most steps of an episode, more are an error; None: the run's limit
    seed: Union[int, None] = None  # of the environments; None: the run's, which repeats its own evaluation
    video: Union[str, None] = None  # write a video of one episode as well (.mp4, .mkv, .webm)
    json: bool = False  # print the result as one JSON object, the last line of stdout


def evaluate(arguments: list[str]) -> int:
    """Run `rlframe evaluate` and return its exit code."""
    options = parse(EvaluateOptions, arguments, "rlframe evaluate", _EVALUATE)
    for name in ("episodes", "num_envs", "max_episode_length"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")
    # Before any code of the user's, which may change the directory.
    options = dataclasses.replace(options, run_dir=os.path.abspath(options.run_dir))
    if options.video is not None:
        extras.require("--video", "gymnasium")
        options = dataclasses.replace(options, video=os.path.abspath(options.video))
    from rlframe.programs.experiment import MAX_SEED

    if options.seed is not None and not 0 <= options.seed <= MAX_SEED:
        raise UsageError(f"--seed must be between 0 and {MAX_SEED}, got {options.seed}.")
    from rlframe.programs.policies import evaluation

    limit = options.max_episode_length
    result = evaluation.evaluate(
        options.run_dir,
        episodes=options.episodes,
        seed=options.seed,
        num_envs=options.num_envs,
        max_episode_length=limit,
    )
    names = ("return_mean", "return_std", "episodes", "length_mean", "params_version")
    values: dict[str, Any] = {name: result[name] for name in names}
    values["run_dir"] = options.run_dir
    print(
        f"return {values['return_mean']:.1f}{plus_minus(values['return_std'], values['episodes'])} "
        f"over {values['episodes']} episodes of {values['length_mean']:.1f} steps",
        file=sys.stderr,
    )
    if options.video is not None:
        filmed = evaluation.record(options.run_dir, options.video, seed=options.seed, max_episode_length=limit)
        values["video"] = options.video
        print(f"{options.video}: return {filmed['return_mean']:.1f}, {filmed['frames']} frames", file=sys.stderr)
    if options.json:
        print(json.dumps(values))
    return 0


@dataclasses.dataclass(frozen=True)
class PlotOptions(CommandOptions):
    """Options of `rlframe plot`."""

    run_dirs: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="RUN_DIR...", help="directories of runs, of several seeds, or of sweeps"),
    ]
    out: Union[str, None] = None  # .png, .svg or .pdf; None: learning_curve.png, in RUN_DIR where one is named


def plot(arguments: list[str]) -> int:
    """Run `rlframe plot` and return its exit code."""
    options = parse(PlotOptions, arguments, "rlframe plot", _PLOT)
    if not options.run_dirs:
        raise UsageError("Name one run directory or several. See `rlframe plot --help`.")
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
    """Run `rlframe bench`: the benchmarks of the checkout that rlframe is installed from, and return the exit code."""
    root = pathlib.Path(rlframe.__file__).parent.parent
    if not (root / "benchmarks" / "runner.py").is_file():
        raise UsageError("`rlframe bench` needs a checkout of rlframe: the benchmarks are no part of the package.")
    sys.path.insert(0, str(root))
    return importlib.import_module("benchmarks.runner").main(arguments) or 0
