"""The time from `rlframe train` to the result of a short run, and its largest parts."""

from __future__ import annotations

from benchmarks.context import Context, run_interleaved
from benchmarks.report import Row, Table, median, processor

TARGET = 4.5  # seconds on two quiet cores


def run(context: Context, log=print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    steps, repeats = context.steps(3_000, 600), context.repeats if context.repeats == 1 else max(context.repeats, 5)
    results, failures = run_interleaved({"run": lambda: context.ours("startup", "--steps", steps)}, repeats, log)
    turns, note = results["run"], failures.get("run", "")
    parts = {
        "imports": "import rlframe.cli.train",
        "compilation": "lowering and compiling, mostly in other threads",
    }
    return [
        Table(
            f"rlframe train --env CartPole-v1 --steps {steps} --eval-episodes 1",
            "s",
            Row("the command", median(turn["command"] for turn in turns), TARGET, note, processor(turns)),
            tuple(Row(name, median(turn[name] for turn in turns), None, text) for name, text in parts.items()),
            higher_is_better=False,
            ratios=False,
            note=f"median of {len(turns)}; the processor time is that of the whole command",
        )
    ]
