"""`rlframe train --seeds 1-5`: one run for each seed, one table and one plot of all."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np

from rlframe.cli.train import SessionOptions
from rlframe.engines.stopping import StopSignal
from rlframe.errors import UsageError
from rlframe.metrics.statistics import interquartile_mean, interval
from rlframe.programs.experiment import Experiment, save_experiment
from rlframe.programs.run_dir import Result, RunDir, default_path

_ONE_RUN = ("seeds", "at_once", "run_dir", "config", "resume", "preset", "json", "quiet")  # not handed on as they are
_REFUSED = ("resume_from", "take_over", "listen", "token_file", "stop_at", "profile", "profile_trace")
_LOOKS = 0.1  # seconds between two looks at the runs


def parse_seeds(text: str) -> list[int]:
    """`1-5`, `1,2,7` or `1-3,10`. Raises UsageError where it is none of these, or names a seed twice."""
    seeds: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            seeds += range(int(first), int(last) + 1) if dash else [int(first)]
    except ValueError:
        raise UsageError(f"--seeds is 1-5, or 1,2,7, got {text!r}.") from None
    if len(set(seeds)) < len(seeds) or not seeds:
        raise UsageError(f"--seeds {text} names {'a seed twice' if seeds else 'none'}: each is one run.")
    return seeds


def run_seeds(experiment: Experiment, session: SessionOptions) -> int:
    """Train once for each seed, in processes of their own, and print and draw what they say together.

    The runs are RUN_DIR/seed-1 and so on; what each prints is in seed-1.log beside it. With `--resume`, those that are
    over stay as they are, and the others go on. Ctrl-C has those under way save and end; after SIGKILL they go on.

    Returns:
        0 where all runs ended well; else 128 + the signal that ended them, or the exit code of the first that failed.
    """
    assert session.seeds is not None
    seeds = parse_seeds(session.seeds)
    for name in _REFUSED:
        if getattr(session, name) != getattr(SessionOptions, name):
            raise UsageError(f"--{name.replace('_', '-')} is of one run; --seeds makes {len(seeds)}.")
    if session.at_once < 1:
        raise UsageError(f"--at-once must be at least 1, got {session.at_once}.")
    directory = pathlib.Path(session.run_dir) if session.run_dir is not None else default_path(experiment)
    if directory.exists() and any(directory.iterdir()) and not session.resume:
        raise UsageError(f"{directory} is not empty. Add --resume to go on with the runs in it, or name another one.")
    directory.mkdir(parents=True, exist_ok=True)
    if not session.resume:
        save_experiment(experiment, directory / "config.json", {})
    runs = [_Run(directory, seed, session) for seed in seeds]
    waiting = [run for run in runs if run.result is None]
    running: list[_Run] = []

    def say(text: str) -> None:
        if not session.quiet:
            print(text, file=sys.stderr, flush=True)

    with StopSignal() as stop:
        told = False
        try:
            while running or (waiting and not told):
                while waiting and not told and len(running) < session.at_once:
                    running.append(waiting.pop(0))
                    running[-1].start(session.resume)
                    say(f"seed {running[-1].seed}: began, in {running[-1].path}")
                for run in [run for run in running if run.has_ended()]:
                    running.remove(run)
                    say(f"seed {run.seed}: {run.said()}")
                if stop.number is not None and not told:
                    told = True
                    for run in running:
                        run.stop()
                time.sleep(_LOOKS)
        finally:  # of a second signal, which has them leave at once
            for run in running:
                run.stop()
            for run in running:
                run.wait()
    code = _report(directory, runs, session)
    return code if stop.number is None else 128 + stop.number


class _Run:
    """One seed's run."""

    def __init__(self, directory: pathlib.Path, seed: int, session: SessionOptions) -> None:
        self.seed, self.path = seed, directory / f"seed-{seed}"
        self._session = session
        self._process: subprocess.Popen[bytes] | None = None
        self.code: int | None = None

    @property
    def result(self) -> Result | None:
        """Of a run that is over."""
        path = RunDir(self.path).result
        result = Result.read(path) if path.exists() else None
        return result if result is not None and result.return_mean is not None else None

    def start(self, resume: bool) -> None:
        """Begins the run, or goes on with what there is of it."""
        command = [sys.executable, "-m", "rlframe", "train", "--run-dir", str(self.path), "--quiet"]
        if resume and (self.path / "config.json").exists():
            command.append("--resume")
        else:
            command += ["--config", str(self.path.parent / "config.json"), "--seed", str(self.seed)]
        for field in dataclasses.fields(SessionOptions):
            value = getattr(self._session, field.name)
            if field.name not in _ONE_RUN and value != field.default:
                name = f"--{field.name.replace('_', '-')}"
                command += [name] if value is True else [name, str(value)]
        with open(self.path.with_suffix(".log"), "ab") as log:
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
        """Has it save and end, as Ctrl-C does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)

    def wait(self) -> None:
        """Waits for its end."""
        assert self._process is not None
        self.code = self._process.wait()

    def said(self) -> str:
        """How it ended."""
        result = self.result
        if self.code or result is None:
            return f"ended with exit code {self.code}; see {self.path.with_suffix('.log')}"
        return f"return {result.return_mean:.1f} ± {result.return_std:.1f}, {result.wall_seconds:.0f} s"


def _report(directory: pathlib.Path, runs: list[_Run], session: SessionOptions) -> int:
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
    low, high = interval(returns)
    return {
        "seeds": [seed for seed, _ in done],
        "returns": returns.tolist(),
        "return_mean": float(returns.mean()),
        "return_std": float(returns.std()),
        "return_iqm": float(interquartile_mean(returns)),
        "return_iqm_interval": [float(low), float(high)],
        "env_steps": sum(result.env_steps for _, result in done),
        "wall_seconds": sum(result.wall_seconds for _, result in done),
        "run_dir": str(directory),
    }


def _print_table(done: list[tuple[int, Result]], summary: dict[str, Any], picture: pathlib.Path) -> None:
    from rich.table import Table

    from rlframe.cli.tables import console

    table = Table(box=None, pad_edge=False)
    for column in ("seed", "return", "± of its episodes", "steps", "updates", "steps/s", "seconds"):
        table.add_column(column, justify="right")
    for seed, result in done:
        numbers = (result.env_steps, result.learner_steps, result.steps_per_second, result.wall_seconds)
        table.add_row(
            str(seed),
            f"{result.return_mean:.1f}",
            f"{result.return_std:.1f}",
            *(f"{number:,.0f}" for number in numbers),
        )
    console(sys.stderr).print(table)
    low, high = summary["return_iqm_interval"]
    text = (
        f"{len(done)} seeds: interquartile mean {summary['return_iqm']:.1f} (95%: {low:.1f} to {high:.1f}), mean "
        f"{summary['return_mean']:.1f} ± {summary['return_std']:.1f} over seeds; see {picture}"
    )
    print(text, file=sys.stderr)
