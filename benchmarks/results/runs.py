"""A run: `rlframe train` in a process of its own, which goes on where it was cut off, and its time."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlframe.engines.stopping import StopSignal

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUNS = pathlib.Path("runs/results")  # from ROOT, where everything runs

_SECONDS_TO_SAVE = 300.0  # that a run has after Ctrl-C
_LOOKS = 0.2  # seconds between two looks at the runs
_INTERRUPTED = 128 + signal.SIGINT


class RunFailed(Exception):
    """A run ended with an error, or before its end; the message says which and where its output is."""


class Run:
    """One seed's run, in `RUNS/NAME-seedN`; beside it what it printed (`.log`) and its time (`.json`).

    Args:
        name: of the task.
        seed: of the run.
        arguments: of `rlframe train`, but for the seed and the directory.
        stop_after: seconds of wall time, of all sessions together, after which it is interrupted; None: never.
        variables: of the environment of its process.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        arguments: Sequence[str],
        stop_after: float | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.seed = name, seed
        self.directory = ROOT / RUNS / f"{name}-seed{seed}"
        self.log = self.directory.with_name(f"{self.directory.name}.log")
        self._notes_file = self.log.with_suffix(".json")
        self._arguments, self._stop_after, self._variables = arguments, stop_after, variables or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._told = 0.0  # when it was told to stop
        self._notes: dict[str, Any] = {}

    @property
    def seconds(self) -> float:
        """Wall time of all sessions until now: imports, compilation and evaluations included."""
        began = self._notes.get("began")
        return self._notes["seconds"] + (time.time() - began if began is not None else 0.0)

    @property
    def sessions(self) -> int:
        """How often it was begun or gone on with."""
        return self._notes["sessions"]

    @property
    def commit(self) -> str:
        """The commits of its sessions."""
        return ", ".join(self._notes["commits"])

    def start(self) -> None:
        """Begin the run, or go on with what there is of it; no process where nothing of it is left to do."""
        resumes = (self.directory / "config.json").is_file() and self._notes_file.is_file()
        self._notes = self._past() if resumes else {"seconds": 0.0, "sessions": 0, "commits": []}
        if resumes and (self._is_complete() or self._is_out_of_time()):
            return
        if not resumes:
            shutil.rmtree(self.directory, ignore_errors=True)
        command = ["train", *self._arguments, "--seed", str(self.seed), "--run-dir", str(self.directory), "--quiet"]
        if resumes:
            command = ["train", "--resume", "--run-dir", str(self.directory), "--quiet"]
        self._notes["sessions"] += 1
        self._notes["commits"] = list(dict.fromkeys([*self._notes["commits"], commit()]))
        self._note(began=time.time())
        print("$ rlframe", *command, file=sys.stderr, flush=True)
        with open(self.log, "ab") as log:
            # In a session of its own: Ctrl-C at a terminal reaches us alone, and the run is told once.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlframe", *command],
                cwd=ROOT,
                env={**os.environ, **self._variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        """Whether its process has; one whose time is up is told to."""
        if self._process is None or self._process.poll() is not None:
            return True
        if not self._told and self._is_out_of_time():
            self.stop()
        if self._told and time.monotonic() - self._told > _SECONDS_TO_SAVE:
            self._process.kill()
        return False

    def stop(self) -> None:
        """Have it save and end, as Ctrl-C does."""
        self._told = time.monotonic()
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)

    def end(self) -> dict[str, Any]:
        """Wait for its end, and return its result; a run whose time was up is evaluated first.

        Raises:
            RunFailed: it has none.
        """
        if self._process is not None:
            code = self._process.wait()
            self._note(seconds=self.seconds)
            if code not in (0, _INTERRUPTED):
                raise RunFailed(f"{self.name}, seed {self.seed}: exit code {code}; see {self.log}")
        if not self._is_complete():
            if not self._is_out_of_time():
                raise RunFailed(f"{self.name}, seed {self.seed}: interrupted after {self.seconds:.0f} s; it can go on")
            self._evaluate()
        return self._result()

    def _evaluate(self) -> None:
        """Write the final evaluation of an interrupted run where an uninterrupted one has it."""
        command = [sys.executable, "-m", "rlframe", "evaluate", str(self.directory), "--json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RunFailed(f"{self.name}, seed {self.seed}: it cannot be evaluated: {done.stderr.strip()}")
        values = json.loads(done.stdout.strip().splitlines()[-1])
        found = {name: values[name] for name in ("return_mean", "return_std", "episodes")}
        result = {**self._result(), **found}
        with open(self.directory / "metrics.jsonl", "a") as rows:
            rows.write(json.dumps({"step": result["env_steps"], **found}) + "\n")
        (self.directory / "result.json").write_text(json.dumps(result) + "\n")

    def _result(self) -> dict[str, Any]:
        path = self.directory / "result.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    def _is_complete(self) -> bool:
        return self._result().get("return_mean") is not None

    def _is_out_of_time(self) -> bool:
        return self._stop_after is not None and self.seconds >= self._stop_after

    def _past(self) -> dict[str, Any]:
        """The notes of the sessions before; one that was killed lasted until it last wrote a row."""
        notes = json.loads(self._notes_file.read_text())
        if "began" in notes:
            rows = self.directory / "metrics.jsonl"
            notes["seconds"] += max(0.0, rows.stat().st_mtime - notes["began"]) if rows.exists() else 0.0
            del notes["began"]
        return notes

    def _note(self, **changes: float) -> None:
        self._notes.pop("began", None)
        self._notes.update(changes)
        self._notes_file.parent.mkdir(parents=True, exist_ok=True)
        self._notes_file.write_text(json.dumps(self._notes) + "\n")


def run_all(runs: Sequence[Run], at_once: int, ended: Callable[[Run, dict[str, Any]], None]) -> list[str]:
    """Train so many beside each other, and hand over each result as it comes. Ctrl-C has those under way save and end.

    Returns:
        What went wrong, a sentence for each run that has no result.
    """
    waiting, running, failed = list(runs), list[Run](), list[str]()

    def take(run: Run) -> None:
        running.remove(run)
        try:
            ended(run, run.end())
        except RunFailed as error:
            failed.append(str(error))
            print(error, file=sys.stderr, flush=True)

    with StopSignal() as stop:
        try:
            while (running or waiting) and stop.number is None:
                while waiting and len(running) < at_once:
                    running.append(waiting.pop(0))
                    running[-1].start()
                for run in [run for run in running if run.has_ended()]:
                    take(run)
                time.sleep(_LOOKS)
        finally:
            for run in running:
                run.stop()
        for run in list(running):
            take(run)
    return failed + [f"{run.name}, seed {run.seed}: not begun" for run in waiting]


def commit() -> str:
    """The commit of the package, with a plus behind it where files of it are not as committed; "" outside of git."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)

    name = git("rev-parse", "--short", "HEAD").stdout.strip()
    changed = name and git("diff", "--quiet", "HEAD", "--", "rlframe").returncode
    return f"{name}+" if changed else name
