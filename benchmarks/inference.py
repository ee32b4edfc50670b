"""The inference service: rows/s for 8 clients with 8 environments each in two processes, and transfer of parameters.

It is compared with its jitted call alone on all 64 rows (Nature CNN, limited by the device), and with a service that
processes one request per call (MLP, limited by the calls). The clients only send requests: over sockets with arrays in
shared memory (as Actors on the same machine do), completely over sockets, by Courier, and as threads of the service's
process.
"""

from __future__ import annotations

from benchmarks.context import Context, run_interleaved
from benchmarks.report import Row, Table, median, processor
from rlframe import extras

WAYS = {
    "shared": "arrays in shared memory",
    "sockets": "over Unix sockets",
    "courier": "over Courier",
    "together": "threads of the service's process",
    "alone": "the jitted call alone, 64 rows",
    "unbatched": "one call for each request, over sockets",
    "wait": "waiting 1 ms for more requests, over sockets",
}
# Targets of the service for a connection type, as a multiple of another figure.
TARGET = {
    ("cnn", "shared"): {"together": 0.95, "alone": 0.75},
    ("cnn", "sockets"): {"courier": 1.0},
    ("mlp", "sockets"): {"unbatched": 1.0, "courier": 1.0},
}
OTHERS = {"shared": ("together", "alone", "sockets"), "sockets": ("courier", "unbatched", "wait")}
TITLES = {"cnn": "Nature CNN, 4 x 84 x 84", "mlp": "MLP, 4 numbers"}


def run(context: Context, log=print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    tables = [table for workload in TITLES for table in _measure(context, workload, log)]
    return [*tables, _measure_params(context, log)]


def _measure(context: Context, workload: str, log) -> list[Table]:
    seconds = context.steps(5, 1)
    contenders = {workload: lambda: context.ours("serve", workload, "--seconds", seconds)}
    results, failures = run_interleaved(contenders, context.repeats, log)

    def row(way: str, target: float | None = None, is_ours: bool = False) -> Row:
        turns = [result.get(way, {}) for result in results[workload]]
        per_call = median(turn.get("rows_per_call") for turn in turns)
        note = failures.get(workload, f"{per_call:.0f} rows a call" if per_call else "")
        rate, spent = median(turn.get("rows_per_second") for turn in turns), processor(turns) if is_ours else None
        return Row(WAYS[way], rate, target, note, spent)

    tables = []
    for way, others in OTHERS.items():
        target = TARGET.get((workload, way), {})
        title = f"Inference {WAYS[way]}, 8 clients of 8 environments: {TITLES[workload]}"
        rows = tuple(row(other, target.get(other)) for other in others)
        tables.append(Table(title, "rows/s", row(way, is_ours=True), rows))
    return tables


def _measure_params(context: Context, log) -> Table:
    reads = context.steps(200, 20)
    ways = {"shared": "shared memory", "sockets": "Unix sockets", "courier": "Courier"}
    if not extras.is_installed("launchpad"):
        del ways["courier"]
    contenders = {way: lambda way=way: context.ours("params", way, "--reads", reads) for way in ways}
    results, failures = run_interleaved(contenders, context.repeats, log)
    ours, *others = (
        Row(
            title,
            median(result.get("microseconds") for result in results[way]),
            note=failures.get(way, ""),
            processor=processor(results[way]),
        )
        for way, title in ways.items()
    )
    title = "A new version of 4 MiB of parameters, from a learner's process to another"
    return Table(title, "us", ours, tuple(others), higher_is_better=False)
