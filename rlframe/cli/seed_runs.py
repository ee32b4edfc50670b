"""Runs of `rlframe train` that differ by their seed, each a process of its own, some of them beside each other."""

from __future__ import annotations

import dataclasses
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from rlframe.cli.tables import plus_minus
from rlframe.cli.train import TrainOptions
from rlframe.engines.base import GRACE
from rlframe.engines.stopping import StopSignal
from rlframe.errors import UsageError
from rlframe.programs.experiment import Experiment
from rlframe.programs.run_dir import Result, RunDir
from rlframe.programs.run_lock import RunLock

# Not handed on as they are:
_ONE_RUN = ("seeds", "at_once", "run_dir", "config", "resume", "take_over", "preset", "json", "quiet")
_REFUSED = ("resume_from", "token_file", "stop_at", "profile", "profile_trace")
_LOOKS = 0.1  # seconds between two looks at the runs


def check_of_several(experiment: Experiment, session: TrainOptions, by: str) -> None:
    """Raises UsageError for what is of one run, where `by`, as a user knows it, makes several."""
    for name in _REFUSED:
        if getattr(session, name) != getattr(TrainOptions, name):
            raise UsageError(f"--{name.replace('_', '-')} is of one run; {by} makes several.")
    if session.take_over and not session.resume:
        raise UsageError("--take-over is of runs to go on with: it needs --resume.")
    if isinstance(session.http, int) and session.http:
        raise UsageError(
            f"--http {session.http} is a port for one run, and {by} makes several: --http 0 finds each one."
        )
    if session.at_once < 1:
        raise UsageError(f"--at-once must be at least 1, got {session.at_once}.")
    if experiment.topology.learns_from != "steps":
        raise UsageError(f"{by} compares returns, and a run of --agent {experiment.agent} has none.")
    if not experiment.topology.eval_episodes:
        raise UsageError(f"{by} compares the returns of evaluations, and --eval-episodes 0 turns them off.")


def lock(directory: RunDir, experiment: Experiment, session: TrainOptions) -> RunLock:
    """The lock of a directory of several runs, whose holder lets them save before it ends."""
    grace = getattr(experiment.topology, "grace_seconds", GRACE)
    return RunLock(directory.path, session.take_over, ends_within=grace + 30.0)


def run_all(next_run: Callable[[], SeedRun | None], ended: Callable[[SeedRun], None], at_once: int) -> int | None:
    """Run what `next_run` gives, `at_once` beside each other, until nothing runs and it gives None.

    Args:
        next_run: gives the next one; None where there is none now.
        ended: hears of each that has ended. What it raises has the others save and end.

    Returns:
        The number of the signal that had them save and end; None where there was none.
    """
    running: list[SeedRun] = []
    with StopSignal() as stop:
        told = False
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
                if stop.number is not None and not told:
                    told = True
                    for run in running:
                        run.stop()
        finally:  # of a second signal, which has them leave at once
            for run in running:
                run.stop()
            for run in running:
                run.wait()


class SeedRun:
    """One seed's run, in `DIRECTORY/seed-N` with the config of the directory.

    Attributes:
        log: what it prints, `DIRECTORY/logs/seed-N.log`.
        code: its exit code, None while it goes on.
        told: whether it was told to stop.
    """

    def __init__(self, directory: pathlib.Path, seed: int, session: TrainOptions) -> None:
        self.seed, self.path = seed, directory / f"seed-{seed}"
        self.log = directory / "logs" / f"seed-{seed}.log"  # not beside the run: `rlframe plot DIRECTORY/seed-*`
        self._session = session
        self._process: subprocess.Popen[bytes] | None = None
        self.code: int | None = None
        self.told = False

    @property
    def result(self) -> Result | None:
        """Of a run that is over."""
        path = RunDir(self.path).result
        result = Result.read(path) if path.exists() else None
        return result if result is not None and result.return_mean is not None else None

    def start(self) -> None:
        """Begins the run; with `--resume` it goes on with what there is of it."""
        command = [sys.executable, "-m", "rlframe", "train", "--run-dir", str(self.path), "--quiet"]
        if self._session.resume and (self.path / "config.json").exists():
            command += ["--resume", *["--take-over"] * self._session.take_over]
        else:
            command += ["--config", str(self.path.parent / "config.json"), "--seed", str(self.seed)]
        for field in dataclasses.fields(TrainOptions):
            value = getattr(self._session, field.name)
            if field.name not in _ONE_RUN and value != field.default:
                name = f"--{field.name.replace('_', '-')}"
                command += [name] if value is True else [name, str(value)]
        self.log.parent.mkdir(exist_ok=True)
        with open(self.log, "ab") as log:
            # In a session of its own: Ctrl-C at a terminal reaches us alone, and each run is told once. A second signal
            # would have it leave without saving.
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def has_ended(self) -> bool:
        """Whether its process has."""
        assert self._process is not None
        self.code = self._process.poll()
        return self.code is not None

    def stop(self) -> None:
        """Has it save and end, as Ctrl-C does, where it has begun."""
        if self._process is not None:
            self.told = True
            self._process.send_signal(signal.SIGINT)

    def wait(self) -> None:
        """Waits for its end."""
        assert self._process is not None
        self.code = self._process.wait()

    def said(self) -> str:
        """How it ended."""
        result = self.result
        if self.told and self.code in (128 + signal.SIGINT, -signal.SIGINT):  # or so early that it took no signals yet
            return "stopped"
        if self.code or result is None:
            return f"ended with exit code {self.code}; see {self.log}: {self._last_words()}"
        spread = plus_minus(result.return_std, result.episodes)
        return f"return {result.return_mean:.1f}{spread}, {result.wall_seconds:.0f} s"

    def _last_words(self) -> str:
        """The last line that it printed."""
        lines = self.log.read_text(encoding="utf-8", errors="backslashreplace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
