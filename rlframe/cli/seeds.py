"""Runs that differ by their seed, each a process: `rlframe train --seeds 1-5`, and each trial of `rlframe sweep`.

`rlframe train --seeds 1-3 --run-dir runs/x` is `run_seeds`:

    seeds = parse_seeds("1-3")                                          # [1, 2, 3]
    check_options_of_several_runs(experiment, options, "--seeds")       # raises for options of a single run
    with lock_several_runs(directory, experiment, options):             # no other process writes to runs/x
        runs = [SeedRun(directory.path, seed, options) for seed in seeds]
        _run_unfinished(runs, options)                                  # by `run_all`, options.at_once at a time
        _report(directory.path, runs, options)                          # the table, the plot

Each `SeedRun` is a process `rlframe train --config runs/x/config.json --seed N --run-dir runs/x/seed-N`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rlframe.cli.train_options import TrainOptions
from rlframe.engines.stopping import StopSignal
from rlframe.errors import UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.metrics.curves import ENOUGH, interquartile_mean, interval, plus_minus
from rlframe.programs.experiment import MAX_SEED, Experiment
from rlframe.programs.options.config_file import load_experiment, save_experiment
from rlframe.programs.run_dir.directory import SEEDS, Result, RunDir, default_path
from rlframe.programs.run_dir.lock import RunLock, holder_of

MAX_RUNS = 1_000  # far more than anybody has the time for: such a range is a slip
# Options of the whole command: its runs do not get them.
_NOT_PASSED_ON = ("seeds", "at_once", "run_dir", "config", "resume", "take_over", "preset", "json", "quiet")
# Options of a single run: the command refuses them.
_SINGLE_RUN_ONLY = ("resume_from", "token_file", "stop_at", "profile", "profile_trace")
_LOOKS = 0.1  # seconds between two looks at the runs


# --- what several runs share


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


def check_options_of_several_runs(experiment: Experiment, options: TrainOptions, by: str) -> None:
    """Raise UsageError for options that several runs cannot share. `by` names the option or command of several runs."""
    for name in _SINGLE_RUN_ONLY:
        if getattr(options, name) != getattr(TrainOptions, name):
            raise UsageError(f"--{name.replace('_', '-')} is of one run; {by} makes several.")
    if options.take_over and not options.resume:
        raise UsageError("--take-over is of runs to go on with: it needs --resume.")
    if isinstance(options.http, int) and options.http:
        raise UsageError(
            f"--http {options.http} is a port for one run, and {by} makes several: --http 0 finds each one."
        )
    if options.at_once < 1:
        raise UsageError(f"--at-once must be at least 1, got {options.at_once}.")
    if experiment.topology_config.learns_from != "steps":
        raise UsageError(f"{by} compares returns, and a run of --agent {experiment.agent} has none.")
    if not experiment.topology_config.evaluates:
        raise UsageError(f"{by} compares the returns of evaluations, and --eval-episodes 0 turns them off.")


def lock_several_runs(directory: RunDir, experiment: Experiment, options: TrainOptions) -> RunLock:
    """Return the lock of a directory of several runs. Its holder waits until they have saved."""
    ends_within = experiment.topology_config.grace_seconds + 30.0
    return RunLock(directory.path, options.take_over, ends_within)


# --- the processes


def run_all(next_run: Callable[[], SeedRun | None], ended: Callable[[SeedRun], None], at_once: int) -> int | None:
    """Run up to `at_once` runs at a time, until none is left.

    Args:
        next_run: returns the next run, or None if there is none now.
        ended: called with each run that has ended. If it raises, the other runs save and end.

    Returns:
        The number of the signal that stopped them, or None.
    """
    running: list[SeedRun] = []
    with StopSignal() as stop:
        has_stopped_them = False
        try:
            while True:
                while stop.number is None and len(running) < at_once and (run := next_run()) is not None:
                    run.start()
                    running.append(run)
                if not running:
                    return stop.number
                time.sleep(_LOOKS)
                for run in [run for run in running if run.has_ended()]:
                    running.remove(run)
                    ended(run)
                if stop.number is not None and not has_stopped_them:
                    has_stopped_them = True
                    for run in running:
                        run.stop()
        finally:  # a second signal makes them leave at once
            for run in running:
                run.stop()
            for run in running:
                run.wait()


class SeedRun:
    """The run of one seed, in `DIRECTORY/seed-N`, with the config of the directory.

    Attributes:
        log: the file of its output, `DIRECTORY/logs/seed-N.log`.
        code: exit code of its process; None while it runs.
        was_stopped: whether `stop` was called.
    """

    def __init__(self, directory: pathlib.Path, seed: int, options: TrainOptions) -> None:
        self.seed, self.path = seed, directory / f"seed-{seed}"
        self.log = directory / "logs" / f"seed-{seed}.log"  # not beside the run: `rlframe plot DIRECTORY/seed-*`
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.code: int | None = None
        self.was_stopped = False

    @property
    def result(self) -> Result | None:
        """The result of a finished run, else None."""
        path = RunDir(self.path).result
        result = Result.read(path) if path.exists() else None
        return result if result is not None and result.return_mean is not None else None

    def start(self) -> None:
        """Start the run. With `--resume`, continue one that was started before."""
        command = [sys.executable, "-m", "rlframe", "train", "--run-dir", str(self.path), "--quiet"]
        if self._options.resume and (self.path / "config.json").exists():
            command += ["--resume", *["--take-over"] * self._options.take_over]
        else:
            command += ["--config", str(self.path.parent / "config.json"), "--seed", str(self.seed)]
        for field in dataclasses.fields(TrainOptions):
            value = getattr(self._options, field.name)
            if field.name not in _NOT_PASSED_ON and value != field.default:
                name = f"--{field.name.replace('_', '-')}"
                command += [name] if value is True else [name, str(value)]
        self.log.parent.mkdir(exist_ok=True)
        with open(self.log, "ab") as log:
            # A new session: Ctrl-C at a terminal reaches only this process, which tells each run once. A second signal
            # would make it leave without saving.
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def has_ended(self) -> bool:
        """Return True once its process has ended."""
        assert self._process is not None
        self.code = self._process.poll()
        return self.code is not None

    def stop(self) -> None:
        """Make a started run save and end, as Ctrl-C does."""
        if self._process is not None:
            self.was_stopped = True
            self._process.send_signal(signal.SIGINT)

    def wait(self) -> None:
        """Wait for the end of its process."""
        assert self._process is not None
        self.code = self._process.wait()

    def outcome(self) -> str:
        """Return how it ended, for a person."""
        result = self.result
        # A run that has just begun does not catch the signal yet, which then kills it.
        if self.was_stopped and self.code in (128 + signal.SIGINT, -signal.SIGINT):
            return "stopped"
        if self.code or result is None:
            return f"ended with exit code {self.code}; see {self.log}: {self._last_words()}"
        spread = plus_minus(result.return_std, result.episodes)
        return f"return {result.return_mean:.1f}{spread}, {result.wall_seconds:.0f} s"

    def _last_words(self) -> str:
        """Return the last line of its output."""
        lines = self.log.read_text(encoding="utf-8", errors="backslashreplace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


# --- `rlframe train --seeds`


def run_seeds(experiment: Experiment, options: TrainOptions) -> int:
    """Train once for each seed, each in a process. Print a table and draw a plot of all runs. Return the exit code.

    The runs are RUN_DIR/seed-1 and so on; RUN_DIR/logs has their output. `--resume` leaves finished runs alone and
    continues the others. At Ctrl-C the runs save and end. SIGKILL does not reach them: `--resume --take-over` ends them
    and continues.

    Returns:
        0 if all runs ended well; else 128 + the signal that ended them, or the exit code of the first that failed.
    """
    assert options.seeds is not None
    seeds = parse_seeds(options.seeds)
    check_options_of_several_runs(experiment, options, "--seeds")
    directory = RunDir(options.run_dir if options.run_dir is not None else default_path(experiment))
    if options.resume:
        directory.check_holds(SEEDS)
        if experiment != load_experiment(directory.config):
            raise UsageError(
                f"Runs that are gone on with keep their options: leave out of rlframe train --seeds {options.seeds} "
                f"--resume --run-dir {directory.path} those of the experiment, or begin other runs."
            )
    else:
        _check_begins(experiment, options)
        directory.create()
    with lock_several_runs(directory, experiment, options):
        if not options.resume:
            directory.create()  # check again: another process may have used it before the lock
            save_experiment(experiment, directory.config, {})
        _write_seeds(directory, options.seeds, seeds)
        runs = [SeedRun(directory.path, seed, options) for seed in seeds]
        _check_free(runs, options)
        stopped_by = _run_unfinished(runs, options)
        code = _report(directory.path, runs, options)
    if stopped_by is None:
        return code
    over = sum(run.result is not None for run in runs)
    print(
        f"{over} of {len(runs)} runs are over; what the others did is saved. Go on: {directory.resume_command}",
        file=sys.stderr,
    )
    return 128 + stopped_by


def _check_begins(experiment: Experiment, options: TrainOptions) -> None:
    """Raise what a run would raise before its first step."""
    import jax

    from rlframe.programs.api import check_trackers, control_address_of
    from rlframe.programs.runner import check_extras
    from rlframe.programs.topologies.parts import make_agent
    from rlframe.programs.training.updates import check_updates

    check_trackers(options)
    check_extras(experiment, with_control=control_address_of(experiment, options) is not None)
    jax.config.update("jax_platforms", "cpu")  # the accelerator's memory is for the runs
    check_updates(experiment, make_agent(experiment))


def _write_seeds(directory: RunDir, text: str, seeds: list[int]) -> None:
    """Write the seeds of all runs to `seeds.json`: these and earlier ones."""
    path = directory.path / SEEDS
    before = parse_seeds(json.loads(path.read_text())["seeds"]) if path.exists() else []
    if not set(before) <= set(seeds):
        text = ",".join(map(str, sorted({*before, *seeds})))
    write_atomically(path, json.dumps({"seeds": text.replace(" ", "")}), "\n")


def _check_free(runs: list[SeedRun], options: TrainOptions) -> None:
    """Raise UsageError if another process writes to one of the runs."""
    for run in runs:
        if not options.take_over and (holder := holder_of(run.path)) is not None:
            raise UsageError(
                f"{run.path} is in use by {holder}: wait for its end, stop it (rlframe stop {run.path}), or have it "
                "ended and gone on with by --resume --take-over."
            )


def _run_unfinished(runs: list[SeedRun], options: TrainOptions) -> int | None:
    """Run those that are not finished. Return the number of the signal that ended them, or None."""
    waiting = [run for run in runs if run.result is None]

    def say(run: SeedRun, text: str) -> None:
        if not options.quiet:
            print(f"seed {run.seed}: {text}", file=sys.stderr, flush=True)

    def next_run() -> SeedRun | None:
        if not waiting:
            return None
        say(waiting[0], f"began, in {waiting[0].path}")
        return waiting.pop(0)

    return run_all(next_run, lambda run: say(run, run.outcome()), options.at_once)


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
    from rlframe.metrics.terminal import console, table

    rows = []
    for seed, result in done:
        numbers = (result.env_steps, result.learner_steps, result.steps_per_second, result.wall_seconds)
        spread = plus_minus(result.return_std, result.episodes).removeprefix(" ± ")
        rows.append((str(seed), f"{result.return_mean:.1f}", spread, *(f"{number:,.0f}" for number in numbers)))
    columns = ("seed", "return", "± of its episodes", "steps", "updates", "steps/s", "seconds")
    console(sys.stderr).print(table(columns, rows, right=True))
    text = f"mean {summary['return_mean']:.1f}{plus_minus(summary['return_std'], len(done))} over seeds"
    if len(done) == 1:
        text = f"return {summary['return_mean']:.1f}"
    elif len(done) >= ENOUGH:
        low, high = summary["return_iqm_interval"]
        text = f"interquartile mean {summary['return_iqm']:.1f} (95%: {low:.1f} to {high:.1f}), {text}"
    else:
        text += f" (lowest to highest: {min(summary['returns']):.1f} to {max(summary['returns']):.1f})"
    print(f"{len(done)} seed{'s' * (len(done) > 1)}: {text}; see {picture}", file=sys.stderr)
