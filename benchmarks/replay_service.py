"""Inserts and samples of the replay service compared with Reverb, with each server in a separate process.

All data has the size of CartPole. The service is called over Unix sockets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from benchmarks.context import Context, run_interleaved
from benchmarks.report import Row, Table, median, processor

# name -> (title, argument for the service's script, arguments for Reverb's script, Reverb's result key, Reverb's label)
ROWS: dict[str, tuple[str, str, tuple[Any, ...], str, str]] = {
    "single": (
        "insert: steps of one environment",
        "steps",
        ("insert", "transitions"),
        "steps_per_second",
        "Reverb alone",
    ),
    "unrolls in": (
        *("insert: unrolls of 64 environments and 20 steps", "insert unrolls", ("insert", "ours")),
        *("steps_per_second", "Reverb through rlframe's buffer"),
    ),
    "transitions": (
        *("sample: batches of 256 transitions", "transitions", ("sample", "transitions")),
        *("ours", "Reverb through rlframe's dataset"),
    ),
    "unrolls out": (
        *(
            "sample: batches of 32 unrolls of 20 steps from a queue",
            "unrolls",
            ("sample", "unrolls", "--items", 64_000),
        ),
        *("ours", "Reverb through rlframe's dataset"),
    ),
}


def run(context: Context, log: Callable[[str], None] = print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    seconds = context.steps(3, 1)
    tables = []
    for title, way, reverb, figure, name in ROWS.values():
        timed = () if "--items" in reverb else ("--seconds", seconds)
        contenders = {
            "service": functools.partial(context.ours, "replay_service", way, "--seconds", seconds),
            "reverb": functools.partial(context.ours, "reverb", *reverb, *timed),
        }
        tables.append(_table(f"Replay service, {title}", contenders, figure, name, context, log))
    own = {"service": functools.partial(context.ours, "replay_service", "prioritized", "--seconds", seconds)}
    return [*tables, _table("Replay service, sample: 256 by priority, and update", own, "", "", context, log)]


def _table(title: str, contenders: Any, figure: str, name: str, context: Context, log: Callable[[str], None]) -> Table:
    results, failures = run_interleaved(contenders, context.repeats, log)
    service = results["service"]
    value = median(turn.get("steps_per_second") for turn in service)
    ours = Row("the service", value, None, failures.get("service", ""), processor(service))
    others = [
        Row(name, median(turn.get(figure) for turn in turns), 1.0, failures.get(way, ""))
        for way, turns in results.items()
        if way != "service"
    ]
    return Table(title, "a second", ours, tuple(others))
