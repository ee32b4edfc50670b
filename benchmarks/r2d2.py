"""R2D2's Learner, including sampling and priorities, compared with its jitted update alone."""

from __future__ import annotations

from benchmarks.context import Context, run_interleaved
from benchmarks.report import Row, Table, median, processor

CONFIGS = {"paper": "batches of 64, 40 + 80 steps", "small": "batches of 32, 8 + 32 steps"}
TARGET = 0.8


def run(context: Context, log=print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    return [_table(context, config, log) for config in CONFIGS]


def _table(context: Context, config: str, log) -> Table:
    seconds = context.steps(8, 1)
    contenders = {config: lambda: context.ours("sequences", config, "--seconds", seconds)}
    results, failures = run_interleaved(contenders, context.repeats, log)
    learner, alone = (median(result[way] for result in results[config]) for way in ("learner", "alone"))
    note = failures.get(config, "")
    return Table(
        f"Learning by R2D2, an LSTM of 64: {CONFIGS[config]}",
        "sequences/s",
        Row("the learner", learner, None, note, processor(results[config])),
        (Row("the jitted update alone", alone, TARGET, note),),
    )
