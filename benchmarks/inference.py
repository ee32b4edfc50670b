"""The inference service: rows/s over Courier for 8 clients with 8 environments each, in two processes.

Against its jitted call alone on all 64 rows (Nature CNN, bound by the device), and against a service that answers one
request by one call (an MLP, bound by the calls). The clients do nothing but ask.
"""

from __future__ import annotations

from benchmarks.context import Context, in_turns
from benchmarks.report import Row, Table, middle

WAYS = {
    "service": "rlframe's service",
    "alone": "the jitted call alone, 64 rows",
    "unbatched": "one call for each request",
    "wait": "waiting 1 ms for more requests",
}
# The least that the service is to reach, as a multiple of another way.
WANTED = {"cnn": {"alone": 0.55}, "mlp": {"unbatched": 1.0}}
TITLES = {"cnn": "Nature CNN, 4 x 84 x 84", "mlp": "MLP, 4 numbers"}


def run(context: Context, say=print) -> list[Table]:
    """Measures; see `benchmarks.runner`."""
    return [_measure(context, workload, say) for workload in TITLES]


def _measure(context: Context, workload: str, say) -> Table:
    seconds = context.steps(5, 1)
    contenders = {way: lambda way=way: context.ours("serve", workload, way, "--seconds", seconds) for way in WAYS}
    results, failures = in_turns(contenders, context.repeats, say)
    rows = []
    for way, title in WAYS.items():
        per_call = middle(result.get("rows_per_call") for result in results[way])
        note = failures.get(way, f"{per_call:.0f} rows a call" if per_call else "")
        rate = middle(result.get("rows_per_second") for result in results[way])
        rows.append(Row(title, rate, WANTED[workload].get(way), note))
    title = f"Inference over Courier, 8 clients of 8 environments: {TITLES[workload]}"
    return Table(title, "rows/s", rows[0], tuple(rows[1:]))
