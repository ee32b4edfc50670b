"""A run is `rlframe train` in a separate process. It can be interrupted and resumed, and its time is recorded."""

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
RUNS = pathlib.Path("runs/results")  # relative to ROOT, the working directory of all runs

_SECONDS_TO_SAVE = 300.0  # time limit of a run after Ctrl-C
_POLL_SECONDS = 0.2  # seconds between two checks of the runs
_INTERRUPTED = 128 + signal.SIGINT


class RunFailed(Exception):
    """Raised if a run ended with an error or too early. The message names the run and its log."""


class Run:
    """The run of one seed in `RUNS/NAME-seedN`, with its output (`.log`) and its time (`.json`) in files next to it.

    Args:
        name: name of the task.
        seed: seed of the run.
        arguments: arguments of `rlframe train`, without seed and directory.
        stop_after: seconds of wall time, over all sessions, after which the run is interrupted. None means never.
        variables: environment variables of its process.
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
        self._stopped_at = 0.0  # time of `stop`, or 0
        self._notes: dict[str, Any] = {}

    @property
    def seconds(self) -> float:
        """Wall time of all sessions so far, including imports, compilation and evaluations."""
        began = self._notes.get("began")
        return self._notes["seconds"] + (time.time() - began if began is not None else 0.0)

    @property
    def sessions(self) -> int:
        """Number of sessions: the start and each resume."""
        return self._notes["sessions"]

    @property
    def commit(self) -> str:
        """The commits of the sessions."""
        return ", ".join(self._notes["commits"])

    def start(self) -> None:
        """Start or resume the run. Start no process if nothing is left to do."""
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
            # In a new session, so that Ctrl-C at a terminal reaches only this process, which then sends one signal to
            # the run.
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
        """Return True if the process has ended. Interrupt the run if its time is up."""
        if self._process is None or self._process.poll() is not None:
            return True
        if not self._stopped_at and self._is_out_of_time():
            self.stop()
        if self._stopped_at and time.monotonic() - self._stopped_at > _SECONDS_TO_SAVE:
            self._process.kill()
        return False

    def stop(self) -> None:
        """Request that the run saves and ends, as Ctrl-C does."""
        self._stopped_at = time.monotonic()
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)

    def end(self) -> dict[str, Any]:
        """Wait for the end of the run and return its result. Evaluate the run first if its time was up.

        Raises:
            RunFailed: the run has no result.
        """
        if self._process is not None:
            code = self._process.wait()
            self._note(seconds=self.seconds)
            if code not in (0, _INTERRUPTED):
                raise RunFailed(f"{self.name}, seed {self.seed}: exit code {code}; see {self.log}")
        if not self._is_complete():
            if not self._is_out_of_time():
                raise RunFailed(
                    f"{self.name}, seed {self.seed}: interrupted after {self.seconds:.0f} s; it can be resumed"
                )
            self._evaluate()
        return self._result()

    def _evaluate(self) -> None:
        """Write the final evaluation of an interrupted run into the same files as for a complete run."""
        command = [sys.executable, "-m", "rlframe", "evaluate", str(self.directory), "--json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RunFailed(f"{self.name}, seed {self.seed}: evaluation failed: {done.stderr.strip()}")
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
        """Return the notes of earlier sessions. A killed session lasted until it wrote its last row."""
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
    """Train `at_once` runs concurrently, and pass each result to `ended` when it is available.

    After Ctrl-C, active runs are saved and ended.

    Returns:
        A message for each run without a result.
    """
    waiting, running, failed = list(runs), list[Run](), list[str]()

    def finish(run: Run) -> None:
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
                    finish(run)
                time.sleep(_POLL_SECONDS)
        finally:
            for run in running:
                run.stop()
        for run in list(running):
            finish(run)
    return failed + [f"{run.name}, seed {run.seed}: not started" for run in waiting]


def commit() -> str:
    """Return the commit of the package, with a plus if files have uncommitted changes, or "" outside git."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)

    name = git("rev-parse", "--short", "HEAD").stdout.strip()
    changed = name and git("diff", "--quiet", "HEAD", "--", "rlframe").returncode
    return f"{name}+" if changed else name
