"""One run: `rlframe train` in a fresh process, and what it left."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from benchmarks.results.tasks import Task
from rlframe.metrics.curves import load_run

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUNS = pathlib.Path("runs/results")  # from ROOT, where everything runs
RECORD = "record.json"  # written last: a directory that has one is a finished run

_SECONDS_TO_SAVE = 300.0  # that a run has after Ctrl-C


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one seed."""

    seed: int
    env_steps: int
    seconds: float  # wall time of the process: imports, compilation and evaluations included
    steps_per_second: float  # of training alone
    return_mean: float  # of the final policy, 20 episodes
    return_std: float  # over those episodes
    reached: int | None  # environment steps of the first evaluation at or above the target; None: there was none
    date: str  # YYYY-MM-DD
    machine: str
    load: float  # the machine's load average when the run ended; above its cores, other work slowed it down
    versions: dict[str, str]

    def passed(self, task: Task) -> bool:
        """Whether the final policy is good enough, and was so in time."""
        return self.return_mean >= task.target and self.env_steps <= task.within * 1.01  # whole batches of steps


def run_dir(task: Any, seed: int) -> pathlib.Path:
    """Where a run is, from `ROOT`."""
    return RUNS / f"{task.name}-seed{seed}"


def is_finished(task: Any, seed: int) -> bool:
    """Whether the run is there already."""
    return (ROOT / run_dir(task, seed) / RECORD).is_file()


def train(task: Task, seed: int) -> None:
    """Trains one seed. What an unfinished attempt left is removed first.

    Raises:
        SystemExit: the command failed; it has said why.
    """
    arguments = ["--agent", task.agent, "--env", task.env, "--seed", str(seed), "--eval-every", str(task.eval_every)]
    run(run_dir(task, seed), arguments, task.seconds)


def run(directory: pathlib.Path, arguments: list[str], stop_after: float | None = None) -> None:
    """`rlframe train` with these arguments into the directory, interrupted after so many seconds, and its record.

    Raises:
        SystemExit: the command failed; it has said why.
    """
    shutil.rmtree(ROOT / directory, ignore_errors=True)
    arguments = ["train", *arguments, "--json", "--run-dir", str(directory)]
    began = time.monotonic()
    result = _rlframe(arguments, stop_after)
    seconds = time.monotonic() - began
    if result["return_mean"] is None:  # interrupted when its time was up
        result.update(_rlframe(["evaluate", str(directory), "--json"], None))
        with open(ROOT / directory / "metrics.jsonl", "a") as rows:  # where an uninterrupted run has it
            rows.write(json.dumps({"step": result["env_steps"], "return_mean": result["return_mean"]}) + "\n")
    write_record(directory, result, seconds, ["rlframe", *arguments])


def write_record(directory: pathlib.Path, result: dict[str, Any], seconds: float, command: list[str]) -> None:
    """What makes a directory a finished run."""
    record = {
        "result": {name: value for name, value in result.items() if name != "run_dir"},
        "seconds": seconds,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "load": os.getloadavg()[0],
        "command": command,
    }
    (ROOT / directory / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def read_record(directory: pathlib.Path) -> dict[str, Any]:
    """What `write_record` wrote."""
    return json.loads((ROOT / directory / RECORD).read_text())


def load(task: Task, seed: int) -> Outcome:
    """What a finished run left."""
    directory = ROOT / run_dir(task, seed)
    record = read_record(run_dir(task, seed))
    curve, result = load_run(directory), record["result"]
    good = [
        step for step, value in zip(curve.evaluated_steps, curve.evaluated_returns, strict=True) if value >= task.target
    ]
    return Outcome(
        seed=seed,
        env_steps=result["env_steps"],
        seconds=record["seconds"],
        steps_per_second=result["steps_per_second"],
        return_mean=result["return_mean"],
        return_std=result["return_std"],
        reached=int(good[0]) if good else None,
        date=record["date"],
        machine=record["machine"],
        load=record["load"],
        versions=json.loads((directory / "config.json").read_text())["notes"]["versions"],
    )


def machine() -> str:
    """`2 cores, AMD EPYC`."""
    names = []
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))  # `taskset` leaves fewer than there are
    return f"{cores} core{'s' if cores > 1 else ''}, {names[0] if names else 'an unknown processor'}"


def _rlframe(arguments: list[str], seconds: float | None) -> dict[str, Any]:
    """Runs the command as a user would, with Ctrl-C after `seconds`, and returns the object on its last line."""
    command = [sys.executable, "-m", "rlframe", *arguments]
    print("\n$ rlframe", *arguments, file=sys.stderr, flush=True)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        timed_out = False
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=_SECONDS_TO_SAVE)
    lines = output.strip().splitlines()
    if process.returncode not in ((0, 128 + signal.SIGINT) if timed_out else (0,)) or not lines:
        raise SystemExit(f"rlframe {' '.join(arguments)} exited with {process.returncode}.")
    return json.loads(lines[-1])
