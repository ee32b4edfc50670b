"""The trajectory service, with every group on disk before it is acknowledged, and the published in-memory server.

Ingest: 8 connections post groups of 8 x 2048 tokens with masks and log-probabilities. Queue: durations of small
requests while 100,000 groups are queued, without other load and while the 8 connections post.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.context import ROOT, Context, run_interleaved
from benchmarks.report import NotMeasured, Row, Table, median, processor

BUILT = ROOT / ".venv-compat/bin/python"  # built by `make compat`
OURS, PACKED, PUBLISHED = "rlframe, SQLite, JSON", "rlframe, SQLite, MessagePack with binary arrays", "atroposlib 0.4.0"
TARGET = {OURS: 2.5, PACKED: 5.0}  # as multiples of the published server's posts/s
STATUS, STATUS_LOADED, BATCH = 2.0, 15.0, 20.0  # milliseconds
MEMORY = 1.2  # resident bytes per byte sent


def run(context: Context, log: Callable[[str], None] = print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    python, missing = _published(context)

    def measure(what: str, *arguments: Any, published: bool = False) -> dict[str, Any]:
        if published and python is None:
            raise NotMeasured(missing)
        return context.ours("trajectories", what, *arguments, *(["--published", python] if published else []))

    seconds = context.steps(5, 1)
    ingest = functools.partial(measure, "ingest", "--seconds", seconds)
    contenders = {
        OURS: ingest,
        PACKED: lambda: ingest("--packed"),
        PUBLISHED: lambda: ingest(published=True),
    }
    posted, why = run_interleaved(contenders, context.repeats, log)
    queue = functools.partial(measure, "queue", "--seconds", seconds, "--groups", context.steps(100_000, 5_000))
    queued, why_queue = run_interleaved({OURS: queue, PUBLISHED: lambda: queue(published=True)}, 1, log)
    return [*_ingest_tables(posted, why), *_queue_tables(queued, why_queue, context.steps(100_000, 5_000))]


def _published(context: Context) -> tuple[Path | None, str]:
    """Return the Python that has `atroposlib`, or None and the reason why there is none."""
    if context.only_ours:
        return None, "left out"
    for python in (context.peers_python, BUILT):
        if python is not None and python.exists():
            found = subprocess.run(
                [str(python), "-c", "import importlib.metadata as m; print(m.version('atroposlib'))"],
                capture_output=True,
                text=True,
                timeout=60.0,
            )
            if found.stdout.strip() == "0.4.0":
                return python, ""
    return None, "no Python with atroposlib 0.4.0: build one with `make compat`, or pass --peers-python"


Results = dict[str, list[dict[str, Any]]]


def _ingest_tables(results: Results, why: dict[str, str]) -> list[Table]:
    def row(name: str, key: str, target: float | None = None, spent: str = "") -> Row:
        value, taken = (median(result.get(figure) for result in results[name]) for figure in (key, spent))
        return Row(name, value, target, why.get(name, ""), taken)

    tables = []
    for ours in (OURS, PACKED):
        title = "Groups of 8 x 2048 tokens with log-probabilities, 8 connections"
        published = row(PUBLISHED, "per_second", TARGET[ours])
        tables.append(Table(title, "posts/s", row(ours, "per_second", spent="processor_us"), (published,)))
    others = (row(PACKED, "cpu_ms"), row(PUBLISHED, "cpu_ms"))
    tables.append(Table("The server's processor time per group", "ms", row(OURS, "cpu_ms"), others, False))
    others = (row(PACKED, "memory_per_byte"), row(PUBLISHED, "memory_per_byte"))
    ours = row(OURS, "memory_per_byte", MEMORY)
    tables.append(Table("Memory per byte of queued groups, as sent", "bytes", ours, others, False))
    others = (row(PACKED, "batch"), row(PUBLISHED, "batch"))
    tables.append(Table("/batch of 8 groups, as JSON", "ms", row(OURS, "batch", spent="batch_us"), others, False))
    return tables


def _queue_tables(results: Results, why: dict[str, str], groups: int) -> list[Table]:
    def table(
        title: str, value: Callable[[dict[str, Any]], Any], key: str, target: float | None = None, unit: str = "ms"
    ) -> Table:
        rows = []
        for name in (OURS, PUBLISHED):
            timings = [value(result) for result in results[name]]
            found = median(timing.get(key) for timing in timings)
            missing = "not measured: none within 20 s" if found is None and results[name] else ""
            limit, spent = (target, processor(timings)) if name == OURS else (None, None)
            rows.append(Row(name, found, limit, why.get(name, missing), spent))
        return Table(f"{title}, {groups:,} queued groups", unit, rows[0], (rows[1],), higher_is_better=False)

    return [
        table("/status-env, median", lambda one: one["idle"], "median", STATUS),
        table("/status-env, 99th percentile", lambda one: one["idle"], "p99"),
        table("/status-env while 8 connections post, median", lambda one: one["loaded"], "median"),
        table("/status-env while 8 connections post, 99th percentile", lambda one: one["loaded"], "p99", STATUS_LOADED),
        table("/batch of 8 small groups, median", lambda one: one["batch"], "median", BATCH),
        table("Memory per byte of small groups, as sent", lambda one: one, "memory_per_byte", MEMORY, "bytes"),
    ]
