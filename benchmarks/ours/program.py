"""Train with a multi-process topology and an engine, and time it. Print one JSON object.

python -m benchmarks.ours.program impala light_env local --steps 100000
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from typing import Any

STARTED = float(os.environ.get("RLFRAME_BENCH_STARTED", time.time()))  # includes the start of the interpreter
_SETTLED = 0.25  # fraction of the steps before the measurement, in which everything compiles


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("agent")
    parser.add_argument("topology")
    parser.add_argument("engine")
    parser.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()
    print(json.dumps(measure(args.agent, args.topology, args.engine, args.steps)))


def measure(agent: str, topology: str, engine: str, steps: int) -> dict[str, float]:
    """Return steps and updates per second after compilation, and the seconds until the first update was reported."""
    from rlframe import programs
    from rlframe.programs import make_experiment

    train = getattr(programs, "run_experiment", None) or programs.train  # its name in older checkouts

    rows: list[dict[str, Any]] = []
    options = {"topology": topology, "engine": engine, "num_actors": 2, "log_every": steps // 50, "eval_episodes": 1}
    experiment = make_experiment(agent, "CartPole-v1", steps=steps, seed=1, **options)
    with tempfile.TemporaryDirectory(prefix="rlframe-bench-") as directory:

        def note(info: Any) -> None:
            rows.append({"step": info.step, "seen": time.time(), **info.values})

        train(experiment, run_dir=f"{directory}/run", callbacks=[note])
    learning = [row for row in rows if row.get("learner_steps", 0) > 0 and "wall_seconds" in row]
    first = next(row for row in learning if row["step"] >= _SETTLED * steps)
    last = learning[-1]
    seconds = last["wall_seconds"] - first["wall_seconds"]
    return {
        "steps_per_second": (last["step"] - first["step"]) / seconds,
        "updates_per_second": (last["learner_steps"] - first["learner_steps"]) / seconds,
        "until_first_update": learning[0]["seen"] - STARTED,
    }


if __name__ == "__main__":
    main()
