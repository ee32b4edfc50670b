"""Inserts and samples of Reverb through rlframe's buffer, compared with Reverb alone and with shared memory.

All data has the size of CartPole. The server runs in a separate process.
"""

from __future__ import annotations

from benchmarks.context import Context, run_interleaved
from benchmarks.report import Row, Table, median, processor
from benchmarks.shared_memory import WORKLOADS, shared

INSERTS = {
    "ours": "rlframe, unrolls of 64 environments and 20 steps",
    "blocks": "the same arrays by Reverb's writer alone",
    "appends": "one step per append, an item of 20 steps every 20 steps",
    "transitions": "one step per append, an item of 2 steps each",
}
SHARED = "shared memory, 64 steps per insert, from another process"
SAMPLES = {
    "transitions": "Reverb: sample batches of 256 transitions",
    "unrolls": "Reverb: sample batches of 32 unrolls of 20 steps from a queue",
    "blocks": "Reverb: the same, 16 unrolls per item, as in `distributed`",
}
# steps/s of unrolls; multiple of Reverb's single steps; fraction of a bare sampler
LEAST, AHEAD, OF_BARE = 1e6, 100.0, 0.9


def run(context: Context, log=print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    return [*_inserts(context, log), *(_sample(context, workload, title, log) for workload, title in SAMPLES.items())]


def _inserts(context: Context, log) -> list[Table]:
    seconds = context.steps(3, 1)
    contenders = {way: lambda way=way: context.ours("reverb", "insert", way, "--seconds", seconds) for way in INSERTS}
    contenders["shared"] = lambda: _shared(context.steps(1, 0.1))
    results, failures = run_interleaved(contenders, context.repeats, log)

    def row(way: str, target: float | None = None, name: str = "") -> Row:
        value = median(result["steps_per_second"] for result in results[way])
        spent = processor(results[way]) if way in ("ours", "shared") else None
        return Row(name or INSERTS[way], value, target, failures.get(way, ""), spent)

    unrolls = Table(
        "Reverb: insert", "environment steps/s", row("ours", LEAST), (row("blocks"), row("appends"), row("transitions"))
    )
    title = "Shared memory against Reverb's per-step inserts"
    others = (row("appends", AHEAD), row("transitions", AHEAD))
    return [unrolls, Table(title, "environment steps/s", row("shared", name=SHARED), others)]


def _shared(seconds: float) -> dict[str, float]:
    insert, _ = shared(*WORKLOADS["cartpole"], seconds)
    return {"steps_per_second": 64e6 / insert.least, "processor_us": insert.processor / 64}


def _sample(context: Context, workload: str, title: str, log) -> Table:
    size = (
        ("--seconds", context.steps(3, 1)) if workload == "transitions" else ("--items", context.steps(64_000, 4_000))
    )
    contenders = {workload: lambda: context.ours("reverb", "sample", workload, *size)}
    results, failures = run_interleaved(contenders, context.repeats, log)
    ours, bare = (median(result[way] for result in results[workload]) for way in ("ours", "bare"))
    note = failures.get(workload, "")
    row = Row("rlframe's dataset", ours, None, note, processor(results[workload]))
    return Table(title, "items/s", row, (Row("a bare sampler", bare, OF_BARE),))
