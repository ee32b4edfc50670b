"""`rlframe train --seeds 1-5`: one run for each seed, one table and one plot of all."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import numpy as np

from rlframe.cli.seed_runs import SeedRun, check_of_several, lock, run_all
from rlframe.cli.session import check_begins
from rlframe.cli.tables import plus_minus
from rlframe.cli.train import TrainOptions
from rlframe.errors import UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.metrics.statistics import ENOUGH, interquartile_mean, interval
from rlframe.programs.experiment import MAX_SEED, Experiment, load_experiment, save_experiment
from rlframe.programs.run_dir import SEEDS, Result, RunDir, default_path
from rlframe.programs.run_lock import holder_of

MAX_RUNS = 1_000  # far more than anybody has the time for: such a range is a slip


def parse_seeds(text: str) -> list[int]:
    """`1-5`, `1,2,7` or `1-3,10`. Raises UsageError for others, for a seed named twice, and for more than MAX_RUNS."""
    parts: list[range] = []
    try:
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            parts.append(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        raise UsageError(f"--seeds is 1-5, or 1,2,7, got {text!r}.") from None
    if (largest := max(part.stop for part in parts) - 1) > MAX_SEED:
        raise UsageError(f"--seeds {text}: a seed is at most {MAX_SEED}, got {largest}.")
    if (count := sum(map(len, parts))) > MAX_RUNS:
        raise UsageError(f"--seeds {text} names {count:,} seeds: each is one run, of which {MAX_RUNS:,} may be.")
    seeds = [seed for part in parts for seed in part]
    if len(set(seeds)) < len(seeds) or not all(parts):
        raise UsageError(f"--seeds {text} names {'a seed twice' if all(parts) else 'none'}: each is one run.")
    return seeds


def run_seeds(experiment: Experiment, session: TrainOptions) -> int:
    """Train once for each seed, in processes of their own, and print and draw what they say together.

    The runs are RUN_DIR/seed-1 and so on; what each prints is in RUN_DIR/logs. With `--resume`, those that are over
    stay as they are, and the others go on. Ctrl-C has those under way save and end; after SIGKILL they go on, until
    `--resume --take-over`.

    Returns:
        0 where all runs ended well; else 128 + the signal that ended them, or the exit code of the first that failed.
    """
    assert session.seeds is not None
    seeds = parse_seeds(session.seeds)
    check_of_several(experiment, session, "--seeds")
    directory = RunDir(session.run_dir if session.run_dir is not None else default_path(experiment))
    if session.resume:
        directory.check_holds(SEEDS)
        if experiment != load_experiment(directory.config):
            raise UsageError(
                f"Runs that are gone on with keep their options: leave out of rlframe train --seeds {session.seeds} "
                f"--resume --run-dir {directory.path} those of the experiment, or begin other runs."
            )
    else:
        check_begins(experiment, session)
        directory.create()
    with lock(directory, experiment, session):
        if not session.resume:
            directory.create()  # again: it may have been another's meanwhile
            save_experiment(experiment, directory.config, {})
        _note(directory, session.seeds, seeds)
        runs = [SeedRun(directory.path, seed, session) for seed in seeds]
        _check_free(runs, session)
        stopped_by = _run(runs, session)
        code = _report(directory.path, runs, session)
    if stopped_by is None:
        return code
    over = sum(run.result is not None for run in runs)
    said = f"{over} of {len(runs)} runs are over; what the others did is saved. Go on: {directory.resume_command}"
    print(said, file=sys.stderr)
    return 128 + stopped_by


def _note(directory: RunDir, text: str, seeds: list[int]) -> None:
    """Write in `seeds.json` which runs there are: these, and those of before."""
    path = directory.path / SEEDS
    before = parse_seeds(json.loads(path.read_text())["seeds"]) if path.exists() else []
    if not set(before) <= set(seeds):
        text = ",".join(map(str, sorted({*before, *seeds})))
    write_atomically(path, json.dumps({"seeds": text.replace(" ", "")}), "\n")


def _check_free(runs: list[SeedRun], session: TrainOptions) -> None:
    """Raise UsageError for a run that goes on already: a killed `--seeds` leaves such, or it is gone on with alone."""
    for run in runs:
        if not session.take_over and (holder := holder_of(run.path)) is not None:
            raise UsageError(
                f"{run.path} is in use by {holder}: wait for its end, stop it (rlframe stop {run.path}), or have it "
                "ended and gone on with by --resume --take-over."
            )


def _run(runs: list[SeedRun], session: TrainOptions) -> int | None:
    """Run those that are not over. Return the number of the signal that ended them, or None."""
    waiting = [run for run in runs if run.result is None]

    def say(run: SeedRun, text: str) -> None:
        if not session.quiet:
            print(f"seed {run.seed}: {text}", file=sys.stderr, flush=True)

    def next_run() -> SeedRun | None:
        if not waiting:
            return None
        say(waiting[0], f"began, in {waiting[0].path}")
        return waiting.pop(0)

    return run_all(next_run, lambda run: say(run, run.said()), session.at_once)


def _report(directory: pathlib.Path, runs: list[SeedRun], session: TrainOptions) -> int:
    done = [(run.seed, run.result) for run in runs if run.result is not None]
    failed = next((run for run in runs if run.result is None), None)
    if done:
        from rlframe.metrics import plot_learning_curve

        picture = directory / "learning_curve.png"
        plot_learning_curve([run.path for run in runs if run.result is not None], picture)
        summary = _summary(directory, done)
        if not session.quiet:
            _print_table(done, summary, picture)
        if session.json:
            print(json.dumps(summary), flush=True)
    return 0 if failed is None else failed.code or 1


def _summary(directory: pathlib.Path, done: list[tuple[int, Result]]) -> dict[str, Any]:
    returns = np.array([result.return_mean for _, result in done], np.float64)
    return {
        "seeds": [seed for seed, _ in done],
        "returns": returns.tolist(),
        "return_mean": float(returns.mean()),
        "return_std": float(returns.std()),
        "return_iqm": float(interquartile_mean(returns)) if len(done) >= ENOUGH else None,
        "return_iqm_interval": [float(end) for end in interval(returns)] if len(done) >= ENOUGH else None,
        "env_steps": sum(result.env_steps for _, result in done),
        "wall_seconds": sum(result.wall_seconds for _, result in done),
        "run_dir": str(directory),
    }


def _print_table(done: list[tuple[int, Result]], summary: dict[str, Any], picture: pathlib.Path) -> None:
    from rich.table import Table

    from rlframe.metrics.terminal import console

    table = Table(box=None, pad_edge=False)
    for column in ("seed", "return", "± of its episodes", "steps", "updates", "steps/s", "seconds"):
        table.add_column(column, justify="right")
    for seed, result in done:
        numbers = (result.env_steps, result.learner_steps, result.steps_per_second, result.wall_seconds)
        table.add_row(
            str(seed),
            f"{result.return_mean:.1f}",
            plus_minus(result.return_std, result.episodes).removeprefix(" ± "),
            *(f"{number:,.0f}" for number in numbers),
        )
    console(sys.stderr).print(table)
    text = f"mean {summary['return_mean']:.1f}{plus_minus(summary['return_std'], len(done))} over seeds"
    if len(done) == 1:
        text = f"return {summary['return_mean']:.1f}"
    elif len(done) >= ENOUGH:
        low, high = summary["return_iqm_interval"]
        text = f"interquartile mean {summary['return_iqm']:.1f} (95%: {low:.1f} to {high:.1f}), {text}"
    else:
        text += f" (lowest to highest: {min(summary['returns']):.1f} to {max(summary['returns']):.1f})"
    print(f"{len(done)} seed{'s' * (len(done) > 1)}: {text}; see {picture}", file=sys.stderr)
