"""The replay service beside Reverb: what goes in and what comes out, each server in a process of its own.

Everything is CartPole's size, and the service is called over Unix sockets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from benchmarks.context import Context, in_turns
from benchmarks.report import Row, Table, middle, processor

# What is measured -> (title, the service's way, Reverb's, the figure of Reverb's, its name).
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


def run(context: Context, say: Callable[[str], None] = print) -> list[Table]:
    """Measures; see `benchmarks.runner`."""
    seconds = context.steps(3, 1)
    tables = []
    for title, way, reverb, figure, name in ROWS.values():
        timed = () if "--items" in reverb else ("--seconds", seconds)
        contenders = {
            "service": functools.partial(context.ours, "replay_service", way, "--seconds", seconds),
            "reverb": functools.partial(context.ours, "reverb", *reverb, *timed),
        }
        tables.append(_table(f"Replay service, {title}", contenders, figure, name, context, say))
    own = {"service": functools.partial(context.ours, "replay_service", "prioritized", "--seconds", seconds)}
    return [*tables, _table("Replay service, sample: 256 by priority, and update", own, "", "", context, say)]


def _table(title: str, contenders: Any, figure: str, name: str, context: Context, say: Callable[[str], None]) -> Table:
    results, failures = in_turns(contenders, context.repeats, say)
    service = results["service"]
    value = middle(turn.get("steps_per_second") for turn in service)
    ours = Row("the service", value, None, failures.get("service", ""), processor(service))
    others = [
        Row(name, middle(turn.get(figure) for turn in turns), 1.0, failures.get(way, ""))
        for way, turns in results.items()
        if way != "service"
    ]
    return Table(title, "a second", ours, tuple(others))
