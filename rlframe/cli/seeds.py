"""`rlframe train --seeds`: one run for each seed, and a table and a plot of all runs.

`rlframe train --seeds 1-3 --run-dir runs/x` calls `train_seeds`:

    seeds = parse_seeds("1-3")                                          # [1, 2, 3]
    with lock_multi_run(directory, experiment, options):                # no other process writes to runs/x
        runs = [SeedRun(directory.path, seed, options) for seed in seeds]
        progress = RunsProgress(runs, experiment.steps)                 # one display for all runs
        _run_unfinished(runs, options, progress)                        # calls `run_all`: options.at_once at a time
        _run_together(experiment, runs, options, progress)              # instead, with fused: all in this process
        _report(directory.path, runs, options)                          # prints the table, draws the plot
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
import traceback
from typing import Any

import numpy as np

from rlframe.cli.multi_run import (
    RunsProgress,
    SeedRun,
    check_multi_run_options,
    lock_multi_run,
    parse_seeds,
    run_all,
)
from rlframe.cli.train_options import TrainOptions
from rlframe.errors import UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.metrics.curves import CONFIDENCE, MIN_RUNS_FOR_IQM, interquartile_mean, interval
from rlframe.metrics.terminal import format_number, plus_minus
from rlframe.programs.api import TRACKERS, make_control_address
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.saved_experiment import load_experiment
from rlframe.programs.run_dir.directory import SEEDS, Result, RunDir, default_path
from rlframe.programs.run_dir.lock import holder_of
from rlframe.streams import print_result


def train_seeds(experiment: Experiment, options: TrainOptions) -> int:
    """Train once for each seed. Print a table and draw a plot of all runs.

    Each run has its own process. With the topology fused and without `--at-once`, all runs are in this process.

    The runs are RUN_DIR/seed-1 and so on. Their output is in RUN_DIR/logs. `--resume` skips finished runs and continues
    the others. On Ctrl-C, the runs save and end. If this process is killed by SIGKILL, its runs keep running:
    `--resume --take-over` ends and continues them.

    Returns:
        The exit code: 0 if all runs succeeded, 128 + the signal's number if a signal stopped the runs, otherwise the
        exit code of the first failed run.
    """
    assert options.seeds is not None
    seeds = parse_seeds(options.seeds)
    check_multi_run_options(experiment, options, "--seeds")
    is_joined = experiment.topology_config.joins_seeds and options.at_once is None
    if is_joined and (trackers := [name for name in TRACKERS if getattr(options, name)]):
        raise UsageError(
            f"--{trackers[0]} needs a process for each run, but the topology fused runs all seeds in one process. "
            "Add --at-once 1, which starts a process for each run."
        )
    directory = RunDir(options.run_dir if options.run_dir is not None else default_path(experiment))
    if options.resume:
        directory.check_kind(SEEDS)
        if experiment != load_experiment(directory.config):
            raise UsageError(
                "Resumed runs keep their options. To resume them, leave out the options of the experiment: rlframe "
                f"train --seeds {options.seeds} --resume --run-dir {directory.path}. For other options, start new runs."
            )
    else:
        _check_can_start(experiment, options, uses_device=is_joined)
    with lock_multi_run(directory, experiment, options):
        _write_seeds(directory, options.seeds, seeds)
        runs = [SeedRun(directory.path, seed, options) for seed in seeds]
        _check_not_in_use(runs, options)
        with contextlib.closing(RunsProgress(runs, experiment.steps, is_shown=not options.quiet)) as progress:
            if is_joined:
                stopped_by = _run_together(experiment, runs, options, progress)
            else:
                stopped_by = _run_unfinished(runs, options, progress)
        code = _report(directory.path, runs, options)
    if stopped_by is None:
        return code
    finished = sum(run.result is not None for run in runs)
    print(
        f"{finished} of {len(runs)} runs are finished. The progress of the other runs is saved. "
        f"Resume with: {directory.resume_command}",
        file=sys.stderr,
    )
    return 128 + stopped_by


def _check_can_start(experiment: Experiment, options: TrainOptions, *, uses_device: bool) -> None:
    """Raise the errors that every run would raise before its first step, so that no run starts."""
    import jax

    from rlframe.programs.api import check_trackers
    from rlframe.programs.runner import check_extras
    from rlframe.programs.topologies.makers import make_agent
    from rlframe.programs.training.updates import check_updates

    check_trackers(options)
    check_extras(experiment, with_control=make_control_address(experiment, options) is not None)
    if not uses_device:
        jax.config.update("jax_platforms", "cpu")  # keep the accelerator's memory free for the runs
    check_updates(experiment, make_agent(experiment))


def _write_seeds(directory: RunDir, text: str, seeds: list[int]) -> None:
    """Write the seeds of all runs to `seeds.json`, including the seeds of earlier sessions."""
    path = directory.path / SEEDS
    before = parse_seeds(json.loads(path.read_text())["seeds"]) if path.exists() else []
    if not set(before) <= set(seeds):
        text = ",".join(map(str, sorted({*before, *seeds})))
    write_atomically(path, json.dumps({"seeds": text.replace(" ", "")}), "\n")


def _check_not_in_use(runs: list[SeedRun], options: TrainOptions) -> None:
    """Raise UsageError if another process writes to one of the runs."""
    for run in runs:
        if not options.take_over and (holder := holder_of(run.path)) is not None:
            raise UsageError(
                f"{run.path} is in use by {holder}. Wait until it ends, stop it (rlframe stop {run.path}), or take "
                "over with --resume --take-over."
            )


def _run_unfinished(runs: list[SeedRun], options: TrainOptions, progress: RunsProgress) -> int | None:
    """Run the unfinished runs. Return the number of the signal that stopped them; None if there was no signal."""
    waiting = [run for run in runs if run.result is None]

    def next_run() -> SeedRun | None:
        if not waiting:
            return None
        _print_progress(waiting[0], f"started in {waiting[0].path}", options)
        return waiting.pop(0)

    def ended(run: SeedRun) -> None:
        _print_progress(run, run.outcome(), options)

    return run_all(next_run, ended, options.at_once or 1, progress.update)


def _run_together(
    experiment: Experiment, runs: list[SeedRun], options: TrainOptions, progress: RunsProgress
) -> int | None:
    """Like `_run_unfinished`, but run all unfinished runs in this process."""
    from rlframe.programs.seed_runs import Outcome, run_seeds

    unfinished = {run.seed: run for run in runs if run.result is None}

    def ended(seed: int, outcome: Outcome) -> None:
        run = unfinished[seed]
        if isinstance(outcome, BaseException):
            run.error = outcome
            if options.traceback:
                traceback.print_exception(None, outcome, outcome.__traceback__)
        elif outcome.signal is not None:
            _print_progress(run, "stopped", options)
            return
        elif outcome.evaluation_error is not None:
            _print_progress(run, f"failed: {outcome.evaluation_error}", options)
            return
        _print_progress(run, run.outcome(), options)

    for run in unfinished.values():
        _print_progress(run, f"started in {run.path}", options)
    return run_seeds(
        experiment,
        {seed: run.path for seed, run in unfinished.items()},
        ended=ended,
        poll=progress.update,
        resume=options.resume,
        take_over=options.take_over,
        control_address=make_control_address(experiment, options),
    )[1]


def _print_progress(run: SeedRun, text: str, options: TrainOptions) -> None:
    if not options.quiet:
        print(f"seed {run.seed}: {text}", file=sys.stderr, flush=True)


def _report(directory: pathlib.Path, runs: list[SeedRun], options: TrainOptions) -> int:
    done = [(run.seed, run.result) for run in runs if run.result is not None]
    failed = next((run for run in runs if run.result is None), None)
    if done:
        from rlframe.metrics import plot_learning_curve

        picture = directory / "learning_curve.png"
        plot_learning_curve([run.path for run in runs if run.result is not None], picture)
        summary = _summary(directory, done)
        if not options.quiet:
            _print_table(done, summary, picture)
        if options.json:
            print_result(json.dumps(summary))
    return 0 if failed is None else failed.code or 1


def _summary(directory: pathlib.Path, done: list[tuple[int, Result]]) -> dict[str, Any]:
    returns = np.array([result.return_mean for _, result in done], np.float64)
    return {
        "seeds": [seed for seed, _ in done],
        "returns": returns.tolist(),
        "return_mean": float(returns.mean()),
        "return_std": float(returns.std()),
        "return_iqm": float(interquartile_mean(returns)) if len(done) >= MIN_RUNS_FOR_IQM else None,
        "return_iqm_interval": [float(end) for end in interval(returns)] if len(done) >= MIN_RUNS_FOR_IQM else None,
        "env_steps": sum(result.env_steps for _, result in done),
        "wall_seconds": sum(result.wall_seconds for _, result in done),
        "run_dir": str(directory),
    }


def _print_table(done: list[tuple[int, Result]], summary: dict[str, Any], picture: pathlib.Path) -> None:
    from rlframe.metrics.terminal import console, table

    rows = []
    for seed, result in done:
        numbers = (result.env_steps, result.learner_steps, result.steps_per_second, result.wall_seconds)
        spread = plus_minus(result.return_std, result.episodes).removeprefix(" ± ")
        rows.append((str(seed), format_number(result.return_mean), spread, *(f"{number:,.0f}" for number in numbers)))
    columns = ("seed", "return", "± of its episodes", "steps", "updates", "steps/s", "seconds")
    console(sys.stderr).print(table(columns, rows, right=True))
    mean = format_number(summary["return_mean"])
    text = f"mean {mean}{plus_minus(summary['return_std'], len(done))} over seeds"
    if len(done) == 1:
        text = f"return {mean}"
    elif len(done) >= MIN_RUNS_FOR_IQM:
        low, high = map(format_number, summary["return_iqm_interval"])
        iqm = format_number(summary["return_iqm"])
        text = f"interquartile mean (IQM) {iqm} ({CONFIDENCE:.0%} interval: {low} to {high}), {text}"
    else:
        low, high = format_number(min(summary["returns"])), format_number(max(summary["returns"]))
        text += f" (lowest to highest: {low} to {high})"
    print(f"{len(done)} seed{'s' * (len(done) > 1)}: {text}; see {picture}", file=sys.stderr)
