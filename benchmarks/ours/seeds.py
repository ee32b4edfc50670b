"""Train several seeds of PPO on CartPole-v1 with `rlframe train --seeds`, and time them. Print one JSON object.

python -m benchmarks.ours.seeds --seeds 1-16 --steps 500000
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.ours.train import experiment
from rlframe.cli.main import main as rlframe
from rlframe.metrics.files import read_jsonl
from rlframe.programs.options.saved_experiment import save_experiment


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", required=True, help="1-16")
    parser.add_argument("--steps", type=int, required=True, help="environment steps of each seed")
    args = parser.parse_args()
    every = args.steps // 50
    described = experiment(
        "ppo_purejaxrl_4", 1, args.steps, every, 0, args.steps, env="jax:CartPole-v1", topology="fused"
    )
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(None):
        config, runs = Path(directory) / "config.json", Path(directory) / "runs"
        save_experiment(described, config, {})
        code = rlframe(["train", "--config", str(config), "--seeds", args.seeds, "--run-dir", str(runs), "--quiet"])
        rows = [_rows(path, warm_up=args.steps // 10) for path in sorted(runs.glob("seed-*/metrics.jsonl"))]
    if code:
        raise SystemExit(code)
    # All seeds start at the same time, and run at the same time.
    steps = sum(last["step"] - first["step"] for first, last in rows)
    seconds = max(last["wall_seconds"] for _, last in rows) - min(first["wall_seconds"] for first, _ in rows)
    print(json.dumps({"steps_per_second": steps / seconds, "seeds": len(rows)}))


def _rows(path: Path, warm_up: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the first row after `warm_up` steps, and the last row of training."""
    rows = [row for row in read_jsonl(path) if "wall_seconds" in row]
    return next(row for row in rows if row["step"] >= warm_up), rows[-1]


if __name__ == "__main__":
    main()
