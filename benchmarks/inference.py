"""The inference service: rows/s for 8 clients with 8 environments each, in two processes; and how parameters get there.

Against its jitted call alone on all 64 rows (Nature CNN, bound by the device), and against a service that answers one
request by one call (an MLP, bound by the calls). The clients do nothing but ask: over sockets with the arrays in shared
memory, as Actors on the service's machine do; with all over the sockets; by Courier; and as threads of its process.
"""

from __future__ import annotations

from benchmarks.context import Context, in_turns
from benchmarks.report import Row, Table, middle, processor
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
# The least that the service is to reach by one way to it, as a multiple of another figure.
WANTED = {
    ("cnn", "shared"): {"together": 0.95, "alone": 0.75},
    ("cnn", "sockets"): {"courier": 1.0},
    ("mlp", "sockets"): {"unbatched": 1.0, "courier": 1.0},
}
OTHERS = {"shared": ("together", "alone", "sockets"), "sockets": ("courier", "unbatched", "wait")}
TITLES = {"cnn": "Nature CNN, 4 x 84 x 84", "mlp": "MLP, 4 numbers"}


def run(context: Context, say=print) -> list[Table]:
    """Measures; see `benchmarks.runner`."""
    tables = [table for workload in TITLES for table in _measure(context, workload, say)]
    return [*tables, _measure_params(context, say)]


def _measure(context: Context, workload: str, say) -> list[Table]:
    seconds = context.steps(5, 1)
    contenders = {workload: lambda: context.ours("serve", workload, "--seconds", seconds)}
    results, failures = in_turns(contenders, context.repeats, say)

    def row(way: str, wanted: float | None = None, is_ours: bool = False) -> Row:
        turns = [result.get(way, {}) for result in results[workload]]
        per_call = middle(turn.get("rows_per_call") for turn in turns)
        note = failures.get(workload, f"{per_call:.0f} rows a call" if per_call else "")
        rate, spent = middle(turn.get("rows_per_second") for turn in turns), processor(turns) if is_ours else None
        return Row(WAYS[way], rate, wanted, note, spent)

    tables = []
    for way, others in OTHERS.items():
        wanted = WANTED.get((workload, way), {})
        title = f"Inference {WAYS[way]}, 8 clients of 8 environments: {TITLES[workload]}"
        rows = tuple(row(other, wanted.get(other)) for other in others)
        tables.append(Table(title, "rows/s", row(way, is_ours=True), rows))
    return tables


def _measure_params(context: Context, say) -> Table:
    reads = context.steps(200, 20)
    ways = {"shared": "shared memory", "sockets": "Unix sockets", "courier": "Courier"}
    if not extras.is_installed("launchpad"):
        del ways["courier"]
    contenders = {way: lambda way=way: context.ours("params", way, "--reads", reads) for way in ways}
    results, failures = in_turns(contenders, context.repeats, say)
    ours, *others = (
        Row(
            title,
            middle(result.get("microseconds") for result in results[way]),
            note=failures.get(way, ""),
            processor=processor(results[way]),
        )
        for way, title in ways.items()
    )
    title = "A new version of 4 MiB of parameters, from a learner's process to another"
    return Table(title, "us", ours, tuple(others), higher_is_better=False)
