"""What git keeps of a finished run: a small file for each, from which docs/results.md is made."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import subprocess
import sys
from typing import Any, TypeVar

import numpy as np

from benchmarks.results.runs import ROOT, Run
from rlframe.metrics.curves import RunCurve, load_run
from rlframe.metrics.files import read_jsonl

RECORDS = ROOT / "benchmarks/results/records"

_MOST_POINTS = 200  # of a training curve
_NO_ACCELERATOR = "no accelerator"
_Point = list[float]
_Made = TypeVar("_Made", bound="Made")


@dataclasses.dataclass(frozen=True)
class Made:
    """How a run was made."""

    seed: int
    command: str  # that repeats it
    commit: str  # of the package; with a plus where its files were not as committed; of several sessions "a, b"
    date: str  # YYYY-MM-DD, of its end
    machine: str
    beside: str  # what else of ours went on: "2 runs at once, 1 thread each"
    load: float  # the machine's load average when it ended; above its cores, other work slowed it down
    versions: dict[str, str]
    seconds: float  # wall time of all sessions: imports, compilation and evaluations included
    sessions: int  # more than one: it was cut off, and went on from its last checkpoint
    note: str = dataclasses.field(default="", kw_only=True)  # what else a reader must know
    accelerator: str = dataclasses.field(default=_NO_ACCELERATOR, kw_only=True)  # that JAX found

    @property
    def cores(self) -> int:
        """The processor cores that the run could use."""
        return int(self.machine.split()[0])


@dataclasses.dataclass(frozen=True)
class Record(Made):
    """A run that played games."""

    env_steps: int
    steps_per_second: float  # of training alone, in the last session
    return_mean: float  # of the final policy, 20 episodes
    return_std: float  # over those episodes
    config: dict[str, Any]  # of the experiment, flat, without what differs by seed
    evaluations: list[_Point]  # [steps, mean, deviation over 20 episodes], the final one included
    training: list[_Point]  # [steps, mean return of the episodes that ended since the point before, how many]

    def last(self, count: int) -> float:
        """The mean of the last `count` evaluations."""
        return float(np.mean([mean for _, mean, _ in self.evaluations[-count:]]))

    def reached(self, goal: float) -> int | None:
        """Environment steps of the first evaluation at or above the goal; None: there was none."""
        return next((int(step) for step, mean, _ in self.evaluations if mean >= goal), None)

    def curve(self, agent: str, env: str) -> RunCurve:
        """What its picture is drawn of."""
        training = np.array(self.training, np.float64).reshape(-1, 3).T
        evaluations = np.array(self.evaluations, np.float64).reshape(-1, 3).T
        return RunCurve(agent, env, {}, *training, *evaluations[:2])


def path(name: str, seed: int) -> pathlib.Path:
    """Where the record of a task's seed is."""
    return RECORDS / name / f"seed-{seed}.json"


def read(kind: type[_Made], name: str, seed: int) -> _Made | None:
    """The record of a task's seed, None where there is none."""
    file = path(name, seed)
    return kind(**json.loads(file.read_text())) if file.is_file() else None


def write(name: str, seed: int, record: Made) -> None:
    """Write the record of a task's seed, a line for each field."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in dataclasses.asdict(record).items()]
    file = path(name, seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def made(run: Run, command: str, beside: str) -> Made:
    """How a run that has just ended was made."""
    config = json.loads((run.directory / "config.json").read_text())
    return Made(
        seed=run.seed,
        command=command,
        commit=run.commit,
        date=datetime.date.today().isoformat(),
        machine=machine(),
        beside=beside,
        load=round(os.getloadavg()[0], 1),
        versions=config["notes"]["versions"],
        seconds=round(run.seconds, 1),
        sessions=run.sessions,
        accelerator=accelerator(),
    )


def of_games(run: Run, result: dict[str, Any], how: Made) -> Record:
    """The record of a run that played games, from its directory and its result."""
    curve = load_run(run.directory)
    rows = [row for row in read_jsonl(run.directory / "metrics.jsonl") if row.get("return_mean") is not None]
    return Record(
        **vars(how),
        env_steps=result["env_steps"],
        steps_per_second=_short(result["steps_per_second"]),
        return_mean=_short(result["return_mean"]),
        return_std=_short(result["return_std"]),
        config=curve.config,
        evaluations=[[row["step"], _short(row["return_mean"]), _short(row["return_std"])] for row in rows],
        training=thinned(curve),
    )


def thinned(curve: RunCurve) -> list[_Point]:
    """The training curve in 200 points at most, each the mean over as many rows, weighted by their episodes."""
    groups = np.array_split(np.arange(len(curve.steps)), min(_MOST_POINTS, len(curve.steps)) or 1)
    return [
        [
            int(curve.steps[rows[-1]]),
            _short(np.average(curve.returns[rows], weights=curve.episodes[rows])),
            int(curve.episodes[rows].sum()),
        ]
        for rows in groups
        if len(rows)
    ]


def machine() -> str:
    """`2 cores, AMD EPYC`."""
    names = []
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))  # `taskset` leaves fewer than there are
    return f"{cores} core{'s' if cores > 1 else ''}, {names[0] if names else 'an unknown processor'}"


def accelerator() -> str:
    """`no accelerator`, or the kind of JAX's device. A process of its own asks: a GPU is held until that ends."""
    program = "import jax; device = jax.devices()[0]; print(device.platform != 'cpu' and device.device_kind or '')"
    variables = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    asked = subprocess.run([sys.executable, "-c", program], env=variables, stdout=subprocess.PIPE, text=True)
    return "an unknown accelerator" if asked.returncode else asked.stdout.strip() or _NO_ACCELERATOR


def _short(value: float) -> float:
    """Six digits are enough for a table and a picture."""
    return float(f"{value:.6g}")
