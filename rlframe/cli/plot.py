"""`rlframe plot`."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Annotated, Union

import tyro

from rlframe.cli.parsing import CommandOptions, parse
from rlframe.errors import UsageError

PROG = "rlframe plot"
DESCRIPTION = (
    "Draw the learning curves of runs, one panel per environment. Runs that differ by their seed alone become one "
    "line, their interquartile mean, in the band that holds it with 95% confidence (bootstrap over the seeds); of two "
    "or three seeds their mean, in a band from the lowest to the highest."
)


@dataclasses.dataclass(frozen=True)
class PlotOptions(CommandOptions):
    """Options of `rlframe plot`."""

    run_dirs: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="RUN_DIR...", help="directories of runs, of several seeds, or of sweeps"),
    ]
    out: Union[str, None] = None  # .png, .svg or .pdf; None: learning_curve.png, in RUN_DIR where one is named


def run(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    options = parse(PlotOptions, arguments, PROG, DESCRIPTION)
    if not options.run_dirs:
        raise UsageError(f"Name one run directory or several. See `{PROG} --help`.")
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
