"""`rlframe check-env`: check an environment before the first training."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any, Union

import tyro

from rlframe.cli.parsing import CommandOptions, parse

_DESCRIPTION = (
    "Check an environment: spaces, dtypes, NaN, seeds, resets, ends of episodes, speed and memory. Then recommend a "
    "pool and a training command. The exit code is 1 if there are errors, and 0 if there are only warnings."
)


@dataclasses.dataclass(frozen=True)
class CheckEnvOptions(CommandOptions):
    """Options of `rlframe check-env`."""

    # a name from `rlframe envs`, or file.py:make_env
    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")]
    env_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)  # keyword arguments of the environment
    seed: int = 0  # seed of the environment
    num_envs: Union[int, None] = None  # environments of the later run; None means the default of train
    seconds: float = 2.0  # time for each of the longer checks; long episodes need more
    json: bool = False  # print the report as one JSON object in the last line of stdout


def run(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    options = parse(CheckEnvOptions, arguments, "rlframe check-env", _DESCRIPTION)
    from rlframe.programs.env_check.check import check_env

    seed, num_envs, seconds = options.seed, options.num_envs, options.seconds
    report = check_env(options.env, options.env_kwargs, seed=seed, num_envs=num_envs, seconds=seconds)
    print(json.dumps(report.to_json()) if options.json else report)
    return 0 if report.ok else 1
