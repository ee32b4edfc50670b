"""`rlframe evaluate`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Annotated, Any, Union

import tyro

from rlframe import extras
from rlframe.cli.parsing import CommandOptions, parse
from rlframe.errors import UsageError
from rlframe.metrics.curves import plus_minus

PROG = "rlframe evaluate"
DESCRIPTION = "Play episodes greedily with the latest checkpoint of a run."


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


def run(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    options = parse(EvaluateOptions, arguments, PROG, DESCRIPTION)
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
    from rlframe.programs.policies.evaluation import evaluate, record

    limit = options.max_episode_length
    result = evaluate(
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
        filmed = record(options.run_dir, options.video, seed=options.seed, max_episode_length=limit)
        values["video"] = options.video
        print(f"{options.video}: return {filmed['return_mean']:.1f}, {filmed['frames']} frames", file=sys.stderr)
    if options.json:
        print(json.dumps(values))
    return 0
