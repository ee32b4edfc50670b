"""Records of finished runs: one small file per run, stored in git. docs/project/results.md is generated from them."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from benchmarks.results.runs import ROOT, Run
from rlframe.metrics.curves import RunCurve, load_run
from rlframe.metrics.files import read_jsonl

RECORDS = ROOT / "benchmarks/results/records"

_MOST_POINTS = 200  # maximum points of a training curve
_NO_ACCELERATOR = "no accelerator"
_Point = list[float]
_RunInfo = TypeVar("_RunInfo", bound="RunInfo")


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """The conditions of a run."""

    seed: int
    command: str  # command line that repeats the run
    commit: str  # commit of the package, with a plus if files had uncommitted changes; "a, b" for several sessions
    date: str  # end of the run, YYYY-MM-DD
    machine: str
    beside: str  # other load from this project: "2 runs at once, 1 thread each"
    load: float  # load average of the machine at the end; if above the number of cores, other work slowed the run down
    versions: dict[str, str]
    seconds: float  # wall time of all sessions, including imports, compilation and evaluations
    sessions: int  # more than one if the run was interrupted and resumed
    note: str = dataclasses.field(default="", kw_only=True)  # additional information for readers
    accelerator: str = dataclasses.field(default=_NO_ACCELERATOR, kw_only=True)  # accelerator found by JAX

    @property
    def cores(self) -> int:
        """Number of processor cores that the run could use."""
        return int(self.machine.split()[0])


@dataclasses.dataclass(frozen=True)
class Record(RunInfo):
    """The record of a run that played games."""

    env_steps: int
    steps_per_second: float  # training only, in the last session
    return_mean: float  # final policy, 20 episodes
    return_std: float  # standard deviation over these episodes
    config: dict[str, Any]  # flat config of the experiment, without fields that differ by seed
    evaluations: list[_Point]  # [steps, mean, deviation over 20 episodes], including the final evaluation
    training: list[_Point]  # [steps, mean return of the episodes that ended since the previous point, their number]

    def last(self, count: int) -> float:
        """Return the mean of the last `count` evaluations."""
        return float(np.mean([mean for _, mean, _ in self.evaluations[-count:]]))

    def reached(self, goal: float) -> int | None:
        """Return the environment steps of the first evaluation at or above the goal, or None."""
        return next((int(step) for step, mean, _ in self.evaluations if mean >= goal), None)

    def training_return(self, begin: float, end: float) -> float | None:
        """Return the mean return of the training episodes that ended between two shares of the run's steps.

        None means that no episode ended there.
        """
        points = [point for point in self.training if begin < point[0] / self.env_steps <= end]
        returns, episodes = [mean for _, mean, _ in points], [count for _, _, count in points]
        return float(np.average(returns, weights=episodes)) if sum(episodes) else None

    def curve(self, agent: str, env: str) -> RunCurve:
        """Return the curve for the picture."""
        training = np.array(self.training, np.float64).reshape(-1, 3).T
        evaluations = np.array(self.evaluations, np.float64).reshape(-1, 3).T
        return RunCurve(agent, env, {}, *training, *evaluations[:2])


def path(name: str, seed: int) -> pathlib.Path:
    """Return the file of a record."""
    return RECORDS / name / f"seed-{seed}.json"


def read(kind: type[_RunInfo], name: str, seed: int) -> _RunInfo | None:
    """Return the record of a seed, or None if there is none."""
    file = path(name, seed)
    return kind(**json.loads(file.read_text())) if file.is_file() else None


def write(name: str, seed: int, record: RunInfo) -> None:
    """Write the record of a seed, with one line per field."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in dataclasses.asdict(record).items()]
    file = path(name, seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def run_info(run: Run, command: str, beside: str) -> RunInfo:
    """Return the conditions of a run that has just ended."""
    config = json.loads((run.directory / "config.json").read_text())
    return RunInfo(
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


def game_record(run: Run, result: dict[str, Any], run_info: RunInfo) -> Record:
    """Return the record of a run that played games, from its directory and its result."""
    curve = load_run(run.directory)
    rows = [row for row in read_jsonl(run.directory / "metrics.jsonl") if row.get("return_mean") is not None]
    return Record(
        **vars(run_info),
        env_steps=result["env_steps"],
        steps_per_second=_short(result["steps_per_second"]),
        return_mean=_short(result["return_mean"]),
        return_std=_short(result["return_std"]),
        config=curve.config,
        evaluations=[[row["step"], _short(row["return_mean"]), _short(row["return_std"])] for row in rows],
        training=thinned(curve),
    )


def thinned(curve: RunCurve) -> list[_Point]:
    """Reduce the training curve to at most 200 points. Each is a mean over rows, weighted by their episodes."""
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
    """Return a description such as `2 cores, AMD EPYC`."""
    names = []
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))  # `taskset` may allow fewer cores than the machine has
    return f"{cores} core{'s' if cores > 1 else ''}, {names[0] if names else 'an unknown processor'}"


def accelerator() -> str:
    """Return the kind of JAX's device, or `no accelerator`.

    A separate process determines it, because JAX occupies a GPU until its process ends.
    """
    program = "import jax; device = jax.devices()[0]; print(device.platform != 'cpu' and device.device_kind or '')"
    variables = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    result = subprocess.run([sys.executable, "-c", program], env=variables, stdout=subprocess.PIPE, text=True)
    return "an unknown accelerator" if result.returncode else result.stdout.strip() or _NO_ACCELERATOR


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 95% confidence interval of the mean: percentile bootstrap. Equal values give equal intervals."""
    drawn = np.random.default_rng(0).choice(np.asarray(values, np.float64), (10_000, len(values)))
    low, high = np.percentile(drawn.mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def _short(value: float) -> float:
    """Round to six digits, which are enough for tables and pictures."""
    return float(f"{value:.6g}")
