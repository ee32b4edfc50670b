"""Runs that differ by their seed, each a process: for `rlframe train --seeds` and `rlframe sweep`.

A command of several runs calls, in this order:

    check_multi_run_options(experiment, options, "--seeds")       # raises for options of a single run
    with lock_multi_run(directory, experiment, options):             # no other process writes to the directory
        run_all(next_run, ended, at_once)                               # `next_run` returns a `SeedRun`, or None

Each `SeedRun` is a process `rlframe train --config DIRECTORY/config.json --seed N --run-dir DIRECTORY/seed-N`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from rlframe.cli.train_options import TrainOptions
from rlframe.engines.stopping import StopSignal
from rlframe.errors import UsageError
from rlframe.metrics.curves import plus_minus
from rlframe.programs.experiment import MAX_SEED, Experiment
from rlframe.programs.options.config_file import save_experiment
from rlframe.programs.run_dir.directory import Result, RunDir
from rlframe.programs.run_dir.lock import RunLock

MAX_RUNS = 1_000  # far more than anybody has the time for: such a range is a slip
_POLL = 0.1  # seconds between two checks of the runs


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


def check_multi_run_options(experiment: Experiment, options: TrainOptions, by: str) -> None:
    """Raise UsageError for options that several runs cannot share. `by` names the option or command of several runs."""
    for field in dataclasses.fields(TrainOptions):
        if "multi_run" not in field.metadata and getattr(options, field.name) != field.default:
            raise UsageError(f"--{field.name.replace('_', '-')} is of one run; {by} makes several.")
    if options.take_over and not options.resume:
        raise UsageError("--take-over continues runs: it needs --resume.")
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


@contextlib.contextmanager
def lock_multi_run(directory: RunDir, experiment: Experiment, options: TrainOptions) -> Iterator[None]:
    """Hold the lock of a directory of several runs. Unless they are resumed, create it, with their config.

    The process that holds the lock waits until its runs have saved.
    """
    if not options.resume:
        directory.create()
    with RunLock(directory.path, options.take_over, ends_within=experiment.topology_config.grace_seconds + 30.0):
        if not options.resume:
            directory.create()  # check again: another process may have used it before the lock
            save_experiment(experiment, directory.config, {})
        yield


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
                time.sleep(_POLL)
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
            if field.metadata.get("multi_run") == "each" and value != field.default:
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
