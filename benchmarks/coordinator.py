"""One Coordinator with 200 scripted workers: messages per second, and the time from a response to the next call.

The workers run in the same process. At full speed, a worker responds immediately, so that all 200 responses wait in the
queue. At the target rate, each response takes 0.09 s, and the benchmark measures the time from a response to the next
call of the same worker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from benchmarks.context import Context, run_interleaved
from benchmarks.report import Row, Table, median, processor

WORKERS, TARGET, WORST = 200, 2000.0, 50.0  # number of workers; messages/s; milliseconds
FULL, STEADY = "at full speed", "each response takes 0.09 s"


def run(context: Context, log: Callable[[str], None] = print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    workers = ["--workers", context.steps(WORKERS, 20), "--seconds", context.steps(10, 1)]
    contenders = {
        FULL: functools.partial(context.ours, "coordinator", *workers),
        STEADY: functools.partial(context.ours, "coordinator", *workers, "--answer-after", 0.09),
    }
    found, why = run_interleaved(contenders, context.repeats, log)

    def row(name: str, key: str, target: float | None = None) -> Row:
        values: list[dict[str, Any]] = found[name]
        return Row(name, median(value[key] for value in values), target, why.get(name, ""), processor(values))

    return [
        Table(f"{WORKERS} workers, messages", "messages/s", row(FULL, "messages_per_second", TARGET)),
        Table(
            f"{WORKERS} workers, from a response to the next call, 99th percentile",
            "ms",
            row(STEADY, "worst_ms", WORST),
            (row(FULL, "worst_ms"),),
            higher_is_better=False,
            ratios=False,
        ),
        Table(
            f"{WORKERS} workers, from a response to the next call, median",
            "ms",
            row(STEADY, "median_ms"),
            (row(FULL, "median_ms"),),
            higher_is_better=False,
            ratios=False,
        ),
    ]
