"""Runs that differ only by their seed, each in its own process, for `rlframe train --seeds` and `rlframe sweep`.

A command with several runs calls, in this order:

    check_multi_run_options(experiment, options, "--seeds")             # raises for options of a single run
    with lock_multi_run(directory, experiment, options):                # no other process writes to the directory
        run_all(next_run, ended, at_once)                               # `next_run` returns a `SeedRun`, or None

Each `SeedRun` is a process `rlframe train --config DIRECTORY/config.json --seed N --run-dir DIRECTORY/seed-N`.
`RunsProgress` shows the progress of the runs on stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rlframe.cli.main import one_sentence
from rlframe.cli.train_options import TrainOptions
from rlframe.engines.devices import share_memory
from rlframe.engines.stopping import StopSignal
from rlframe.errors import RlframeError, UsageError
from rlframe.metrics.terminal import TerminalLogger, format_number, plus_minus
from rlframe.programs.experiment import MAX_SEED, Experiment
from rlframe.programs.options.fields import parse_ranges
from rlframe.programs.options.saved_experiment import save_experiment
from rlframe.programs.run_dir.directory import Result, RunDir
from rlframe.programs.run_dir.lock import RunLock
from rlframe.programs.run_dir.status import RunRows

MAX_RUNS = 1_000  # maximum number of seeds; a larger number is probably a typing error
_POLL = 0.1  # seconds between two checks of the runs


def parse_seeds(text: str) -> list[int]:
    """Parse `1-5`, `1,2,7` or `1-3,10`.

    Raises:
        UsageError: the format is wrong, a seed is repeated, or there are more than MAX_RUNS seeds.
    """
    try:
        parts = parse_ranges(text)
    except ValueError:
        raise UsageError(f"--seeds must look like 1-5 or 1,2,7, got {text!r}.") from None
    if (largest := max(part.stop for part in parts) - 1) > MAX_SEED:
        raise UsageError(f"--seeds {text}: a seed must be at most {MAX_SEED}, got {largest}.")
    if (count := sum(map(len, parts))) > MAX_RUNS:
        raise UsageError(f"--seeds {text} contains {count:,} seeds, but at most {MAX_RUNS:,} are allowed.")
    seeds = [seed for part in parts for seed in part]
    if len(set(seeds)) < len(seeds) or not all(parts):
        raise UsageError(f"--seeds {text} contains {'a seed twice' if all(parts) else 'an empty range'}.")
    return seeds


def check_multi_run_options(experiment: Experiment, options: TrainOptions, by: str) -> None:
    """Raise UsageError for options that several runs cannot use.

    `by` is the name of the option or command that starts the runs. Messages contain it.
    """
    for field in dataclasses.fields(TrainOptions):
        if field.metadata.get("multi_run", "refused") == "refused" and getattr(options, field.name) != field.default:
            raise UsageError(f"--{field.name.replace('_', '-')} is only for a single run, but {by} starts several.")
    if options.take_over and not options.resume:
        raise UsageError("--take-over needs --resume.")
    if isinstance(options.http, int) and options.http:
        raise UsageError(
            f"--http {options.http} is a port for a single run, but {by} starts several. Use --http 0: each run gets a "
            "free port."
        )
    if options.at_once is not None and options.at_once < 1:
        raise UsageError(f"--at-once must be at least 1, got {options.at_once}.")
    if experiment.topology_config.learns_from != "steps":
        raise UsageError(f"{by} compares returns, but runs of --agent {experiment.agent} have none.")
    if not experiment.topology_config.evaluates:
        raise UsageError(f"{by} compares evaluation returns, but --eval-episodes 0 turns evaluations off.")


@contextlib.contextmanager
def lock_multi_run(directory: RunDir, experiment: Experiment, options: TrainOptions) -> Iterator[None]:
    """Hold the lock of a directory of several runs. For new runs, create the directory and write the config.

    If another process takes over the directory, this process stops its runs. They have the grace period of a run plus
    30 seconds to save.
    """
    if not options.resume:
        directory.create()
    with RunLock(directory.path, options.take_over, ends_within=experiment.topology_config.grace_seconds + 30.0):
        if not options.resume:
            directory.create()  # check again, because another process may have written to the directory before the lock
            save_experiment(experiment, directory.config, {})
        yield


def run_all(
    next_run: Callable[[], SeedRun | None],
    ended: Callable[[SeedRun], None],
    at_once: int,
    poll: Callable[[], None] = lambda: None,
) -> int | None:
    """Run all runs, up to `at_once` at a time.

    Args:
        next_run: returns the next run, or None if no run can be started now.
        ended: called with each run that has ended. If it raises, the other runs save and end.
        at_once: maximum number of runs at a time.
        poll: called several times a second.

    Returns:
        The number of the signal that stopped the runs; None if there was no signal.
    """
    running: list[SeedRun] = []
    with StopSignal() as stop:
        has_stopped_them = False
        try:
            while True:
                while stop.number is None and len(running) < at_once and (run := next_run()) is not None:
                    run.start(share_memory(at_once))
                    running.append(run)
                if not running:
                    return stop.number
                time.sleep(_POLL)
                poll()
                for run in [run for run in running if run.code is not None]:
                    running.remove(run)
                    ended(run)
                if stop.number is not None and not has_stopped_them:
                    has_stopped_them = True
                    for run in running:
                        run.stop()
        except KeyboardInterrupt:  # a second Ctrl-C: the runs get a second signal and end without saving
            has_stopped_them = False
            raise
        finally:
            for run in running:
                if not has_stopped_them:
                    run.stop()
            for run in running:
                run.wait()


class SeedRun:
    """The run of one seed, in `DIRECTORY/seed-N`, with the config of the directory.

    Attributes:
        log: the output file of the run, `DIRECTORY/logs/seed-N.log`.
        was_stopped: True once `stop` was called.
        error: the error that ended a run in this process, or None.
    """

    def __init__(self, directory: pathlib.Path, seed: int, options: TrainOptions) -> None:
        self.seed, self.path = seed, directory / f"seed-{seed}"
        # The path must not match `DIRECTORY/seed-*`, the pattern of run directories.
        self.log = directory / "logs" / f"seed-{seed}.log"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.was_stopped = False
        self.error: BaseException | None = None

    @property
    def code(self) -> int | None:
        """Exit code of the run's process; None while it is running, or if it was not started."""
        if self.error is not None:
            return self.error.exit_code if isinstance(self.error, RlframeError) else 1
        return self._process.poll() if self._process is not None else None

    @property
    def result(self) -> Result | None:
        """The result of the run; None if the run has not finished."""
        path = RunDir(self.path).result
        result = Result.read(path) if path.exists() else None
        return result if result is not None and result.return_mean is not None else None

    def start(self, env: dict[str, str]) -> None:
        """Start the run, with more environment variables. With `--resume`, continue a run that was started earlier."""
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
            # Start a new session, so that the run does not get the Ctrl-C of the terminal. It must get only the
            # signal of this process, because a second signal would end it without saving.
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **env},
            )

    def stop(self) -> None:
        """Send SIGINT to the run if it was started. The run saves and ends, as after Ctrl-C."""
        if self._process is not None:
            self.was_stopped = True
            self._process.send_signal(signal.SIGINT)

    def wait(self) -> None:
        """Wait until the run's process has ended."""
        assert self._process is not None
        self._process.wait()

    def outcome(self) -> str:
        """Describe how the run ended, for users."""
        result = self.result
        if self.error is not None:
            return f"failed: {one_sentence(self.error)}"
        # A run that has just started has no signal handler yet, so the signal kills it.
        if self.was_stopped and self.code in (128 + signal.SIGINT, -signal.SIGINT):
            return "stopped"
        if self.code or result is None:
            return f"ended with exit code {self.code}; see {self.log}: {self._last_output_line()}"
        spread = plus_minus(result.return_std, result.episodes)
        return f"return {format_number(result.return_mean)}{spread}, {result.wall_seconds:.0f} s"

    def _last_output_line(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="backslashreplace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


_SECONDS_BETWEEN_READS = 0.5


class RunsProgress:
    """A display of the steps of all runs together, their mean return, and the remaining time.

    It reads the rows that the runs write to their directories. Call `update` often.

    Args:
        runs: all runs, also those that are finished or not started.
        steps: number of steps of each run.
        is_shown: if False, show nothing.
    """

    def __init__(self, runs: Sequence[SeedRun], steps: int, *, is_shown: bool = True) -> None:
        self._steps = steps
        self._rows = [RunRows(RunDir(run.path).metrics) for run in runs if is_shown]
        title = f"{len(runs)} run{'s' * (len(runs) > 1)}"
        self._display = TerminalLogger(len(runs) * steps, title=title) if is_shown else None
        self._next_read = 0.0

    def update(self) -> None:
        """Read new rows and draw the display, if some time has passed since the last call."""
        if self._display is None or time.monotonic() < self._next_read:
            return
        newest = [rows.read() for rows in self._rows]
        returns = [row["episode_return"] for row in newest if row.get("episode_return") is not None]
        steps = sum(min(row.get("step", 0), self._steps) for row in newest)
        self._display.write(steps, {"episode_return": np.mean(returns)} if returns else {})
        self._next_read = time.monotonic() + _SECONDS_BETWEEN_READS

    def close(self) -> None:
        """Draw the display a last time."""
        if self._display is not None:
            self._next_read = 0.0
            self.update()
            self._display.close()
