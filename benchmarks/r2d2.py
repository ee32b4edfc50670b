"""R2D2's Learner, sampling and priorities included, beside its jitted update alone."""

from __future__ import annotations

from benchmarks.context import Context, in_turns
from benchmarks.report import Row, Table, middle, processor

CONFIGS = {"paper": "batches of 64, 40 + 80 steps", "small": "batches of 32, 8 + 32 steps"}
WANTED = 0.8


def run(context: Context, say=print) -> list[Table]:
    """Measures; see `benchmarks.runner`."""
    return [_table(context, config, say) for config in CONFIGS]


def _table(context: Context, config: str, say) -> Table:
    seconds = context.steps(8, 1)
    contenders = {config: lambda: context.ours("sequences", config, "--seconds", seconds)}
    results, failures = in_turns(contenders, context.repeats, say)
    learner, alone = (middle(result[way] for result in results[config]) for way in ("learner", "alone"))
    note = failures.get(config, "")
    return Table(
        f"Learning by R2D2, an LSTM of 64: {CONFIGS[config]}",
        "sequences/s",
        Row("the learner", learner, None, note, processor(results[config])),
        (Row("the jitted update alone", alone, WANTED, note),),
    )
