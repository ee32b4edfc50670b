"""One Coordinator and 200 scripted workers in one process: messages per second, and how long a worker waits for a call.

At full speed a worker answers at once, so that all 200 answers wait in line; at the rate that is asked for each takes
0.09 s, and what is measured is how soon one that has answered is called again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from benchmarks.context import Context, in_turns
from benchmarks.report import Row, Table, middle, processor

WORKERS, WANTED, WORST = 200, 2000.0, 50.0  # workers, messages/s, milliseconds
FULL, STEADY = "at full speed", "each answer takes 0.09 s"


def run(context: Context, say: Callable[[str], None] = print) -> list[Table]:
    """Measures; see `benchmarks.runner`."""
    workers = ["--workers", context.steps(WORKERS, 20), "--seconds", context.steps(10, 1)]
    contenders = {
        FULL: functools.partial(context.ours, "coordinator", *workers),
        STEADY: functools.partial(context.ours, "coordinator", *workers, "--answer-after", 0.09),
    }
    found, why = in_turns(contenders, context.repeats, say)

    def row(name: str, what: str, wanted: float | None = None) -> Row:
        values: list[dict[str, Any]] = found[name]
        return Row(name, middle(value[what] for value in values), wanted, why.get(name, ""), processor(values))

    return [
        Table(f"{WORKERS} workers, messages", "messages/s", row(FULL, "messages_per_second", WANTED)),
        Table(
            f"{WORKERS} workers, from an answer to the next call, 99th percentile",
            "ms",
            row(STEADY, "worst_ms", WORST),
            (row(FULL, "worst_ms"),),
            higher_is_better=False,
            ratios=False,
        ),
        Table(
            f"{WORKERS} workers, from an answer to the next call, median",
            "ms",
            row(STEADY, "median_ms"),
            (row(FULL, "median_ms"),),
            higher_is_better=False,
            ratios=False,
        ),
    ]
