"""`python -m benchmarks.results.engines [PYTHON...]` trains CartPole with every engine, for docs/engines.md."""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import time
from typing import Any

from benchmarks.results.records import machine
from benchmarks.results.runs import ROOT, RUNS

PAGE = ROOT / "docs/engines.md"
ENGINES = ("local", "ray")
TOPOLOGIES = ("heavy_env", "light_env", "distributed", "elastic")
AGENTS = {"dqn": 475.0, "ppo": 475.0, "impala": 450.0}  # agent -> target return
SEEDS = (1, 2)  # the second seed runs only if the first misses the target
RECORD = "record.json"  # written last, so it marks a finished run
_SECONDS = 900.0  # time limit of a run

_INTRO = """\
# CartPole under every engine

Each cell is one command with the agent's preset. It shows the mean return of 20 greedy episodes at the end. The targets
are 475 for DQN and PPO, and 450 for IMPALA. If seed 1 misses its target, the cell also shows seed 2. `python -m
benchmarks.results.engines PYTHON...` trains missing runs with the given Pythons and writes this page.

```
rlframe train --engine ENGINE --topology TOPOLOGY --agent AGENT --env CartPole-v1 --num-actors 2 --json --seed SEED
```
"""

# Remove this note when these cells are trained again.
_OLDER = "The cells of DQN used its preset before\n2026-11-25, with an Adam epsilon of 1e-8."


def main() -> None:
    """Train missing runs one after another, and write the page after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results.engines", description=__doc__)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="Pythons of environments with rlframe")
    parser.add_argument(
        "--only", default="", help="train only runs whose names contain this text, for example ray-elastic"
    )
    args = parser.parse_args()
    for python, cell in itertools.product(args.pythons, itertools.product(ENGINES, TOPOLOGIES, AGENTS)):
        if args.only in "-".join(cell):
            _train_until_target(python, *cell)
            write()
    write()


def _train_until_target(python: str, engine: str, topology: str, agent: str) -> None:
    """Train one seed after the other until one reaches the target."""
    version = _output_of([python, "-c", "import platform; print(platform.python_version())"])
    for seed in SEEDS:
        directory = RUNS / f"{engine}-{topology}-{agent}-{version}-seed{seed}"
        record = ROOT / directory / RECORD
        if not record.is_file():
            _train(python, directory, engine, topology, agent, seed)
        if record.is_file() and _return(json.loads(record.read_text())) >= AGENTS[agent]:
            return


def _train(python: str, directory: Any, engine: str, topology: str, agent: str, seed: int) -> None:
    shutil.rmtree(ROOT / directory, ignore_errors=True)
    arguments = ["train", "--engine", engine, "--topology", topology, "--agent", agent, "--env", "CartPole-v1"]
    arguments += ["--num-actors", "2", "--json", "--seed", str(seed)]
    print("$ rlframe", *arguments, file=sys.stderr, flush=True)
    began = time.monotonic()
    command = [python, "-m", "rlframe", *arguments, "--quiet", "--run-dir", str(directory)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"  not finished within {_SECONDS:.0f} s", file=sys.stderr, flush=True)
        return
    if done.returncode:
        print(f"  exit code {done.returncode}: {done.stderr.strip()[-2000:]}", file=sys.stderr, flush=True)
        return
    result = json.loads(done.stdout.strip().splitlines()[-1])
    record = {"result": result, "seconds": time.monotonic() - began}
    (ROOT / directory / RECORD).write_text(json.dumps(record) + "\n")
    print(f"  {result['return_mean']:.1f}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def write() -> None:
    """Write the page from the finished runs."""
    records: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for path in sorted((ROOT / RUNS).glob(f"*/{RECORD}")):
        *cell, seed = path.parent.name.split("-")
        if len(cell) == 4 and cell[0] in ENGINES:
            records.setdefault(tuple(cell), {})[seed] = json.loads(path.read_text())
    pythons = sorted({cell[3] for cell in records}, key=lambda version: [int(part) for part in version.split(".")])
    lines = [
        _INTRO,
        f"Machine: {machine()}. Cells: return, seconds of the whole command (with other load). {_OLDER}\n",
    ]
    for python, engine in itertools.product(pythons, ENGINES):
        lines += [f"## Python {python}, engine {engine}\n", "| | " + " | ".join(AGENTS) + " |"]
        lines += ["|---" * (len(AGENTS) + 1) + "|"]
        for topology in TOPOLOGIES:
            cells = [
                _format_cell(records.get((engine, topology, agent, python), {}), AGENTS[agent]) for agent in AGENTS
            ]
            lines.append(f"| `{topology}` | " + " | ".join(cells) + " |")
        lines.append("")
    PAGE.write_text("\n".join(lines))


def _format_cell(seeds: dict[str, dict[str, Any]], target: float) -> str:
    """Format a cell such as `500.0, 31 s`, and mark returns that miss the target."""
    shown = []
    for name, record in seeds.items():
        value = _return(record)
        seed = "" if name == "seed1" else " (seed 2)"
        missed = "" if value >= target else " **missed**"
        shown.append(f"{value:.1f}{missed}, {record['seconds']:.0f} s{seed}")
    return "; ".join(shown) or "not run"


def _return(record: dict[str, Any]) -> float:
    value = record["result"]["return_mean"]
    return -1.0 if value is None else float(value)


def _output_of(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
