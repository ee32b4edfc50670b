"""`rlframe sweep`: search for the best values of `rlframe train`'s options, with Optuna.

`sweep_options.py` parses the options, `trials.py` runs the trials with `multi_run.py: run_all`, and `_report` in this
file draws the plot and prints the best trial.
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys
from typing import Any

import numpy as np

from rlframe import extras
from rlframe.cli.listings import print_preset
from rlframe.cli.multi_run import check_multi_run_options, lock_multi_run, parse_seeds, run_all
from rlframe.cli.sweep_options import (
    DESCRIPTION,
    PROG,
    SAVED_OPTIONS,
    SweepOptions,
    VariedOption,
    experiment_with,
    read_varied_options,
    with_defaults,
)
from rlframe.cli.train_options import read_arguments
from rlframe.cli.trials import Study, Trials, format_value
from rlframe.interprocess.files import write_atomically
from rlframe.metrics.curves import run_name
from rlframe.metrics.plots import plot_options
from rlframe.metrics.text import format_number
from rlframe.programs.experiment import Experiment
from rlframe.programs.run_dir.directory import SWEEP, RunDir, default_path


def run(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    import setproctitle

    experiment, options, preset = read_arguments(arguments, SweepOptions, PROG, DESCRIPTION)
    assert isinstance(options, SweepOptions)
    extras.require(PROG, "sweep")
    check_multi_run_options(experiment, options, PROG)
    path = default_path(experiment)
    directory = RunDir(options.run_dir if options.run_dir is not None else path.with_name(f"sweep-{path.name}"))
    options = with_defaults(experiment, options, directory)
    varied = read_varied_options(arguments, experiment, options)
    setproctitle.setproctitle("rlframe: sweep")
    if preset is not None and not options.quiet:
        print_preset(preset, experiment, sys.stderr)
    with lock_multi_run(directory, experiment, options):
        kept = {name: getattr(options, name) for name in SAVED_OPTIONS}
        write_atomically(directory.path / SWEEP, json.dumps(kept), "\n")
        study = Study(directory.path, varied, options, experiment.seed)
        trials = Trials(study, functools.partial(experiment_with, arguments), options, directory.path)
        stopped_by = run_all(trials.next_run, trials.ended, options.at_once)
    _report(experiment, options, study, directory.path)
    if stopped_by is None:
        return 0
    print(f"Everything is saved. Resume with: {directory.resume_command}", file=sys.stderr)
    return 128 + stopped_by


def _report(experiment: Experiment, options: SweepOptions, study: Study, directory: pathlib.Path) -> None:
    """Draw sweep.png. Print the trials, best first, and a command that repeats the best trial with new seeds."""
    done = sorted(study.trials("COMPLETE"), key=lambda trial: trial.value, reverse=True)
    if not done:
        return
    failed = study.trials("FAIL")
    title = f"{run_name(experiment.agent, experiment.env)}: {len(done)} trials, the best in orange"
    plot_options(
        [each.panel([trial.params[each.name] for trial in (*done, *failed)]) for each in study.varied],
        [*(trial.value for trial in done), *[None] * len(failed)],
        directory / "sweep.png",
        title + f", and {len(failed)} failed ones (x)" * bool(failed),
    )
    rows = [_row(trial, directory) for trial in (*done, *failed)]
    fresh = max(parse_seeds(options.seeds or "")) + 1
    command = f"rlframe train --config {rows[0]['run_dir']}/config.json --seeds {fresh}-{fresh + 4}"
    if not options.quiet:
        _print_table(study.varied, rows)
        text = f"This is the best of {len(done)} trials on the seeds of the sweep; see {directory / 'sweep.png'}."
        print(f"{text} Test it on other seeds: {command}", file=sys.stderr)
    if options.json:
        best = {**rows[0], "command": command}
        print(json.dumps({"best": best, "trials": rows, "run_dir": str(directory)}), flush=True)


def _row(trial: Any, directory: pathlib.Path) -> dict[str, Any]:
    failed = trial.user_attrs.get("failed")
    return {
        "trial": trial.number,
        "options": trial.params,
        "value": trial.value,
        "returns": trial.user_attrs.get("returns", []),
        **({} if failed is None else {"failed": failed}),
        "run_dir": str(directory / f"trial-{trial.number}"),
    }


def _print_table(varied: list[VariedOption], rows: list[dict[str, Any]]) -> None:
    from rlframe.metrics.terminal import console, table

    names, lines = [each.name for each in varied], []
    for row in rows:
        value = ["failed", ""]
        if row["returns"]:
            several = len(row["returns"]) > 1
            value = [format_number(row["value"]), format_number(float(np.std(row["returns"]))) if several else ""]
        lines.append((str(row["trial"]), *value, *(format_value(row["options"].get(name)) for name in names)))
    console(sys.stderr).print(table(("trial", "return", "± over seeds", *names), lines, right=True))
