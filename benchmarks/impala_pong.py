"""IMPALA on EnvPool's Pong-v5 with two actors and the preset, compared with the limit of the same cores.

Each step is used once for learning. The limit is therefore an environment step, inference and learning in sequence,
each as fast as with all cores alone. If a bare loop of the three in one process is faster, it is the limit.
"""

from __future__ import annotations

from benchmarks.context import Context, run_interleaved
from benchmarks.report import Row, Table, median, processor

TOPOLOGIES = ("heavy_env", "light_env")
PARTS = {"env": "environments alone", "inference": "inference alone", "learner": "learner steps alone"}
LOOP = "a bare loop of the three"
WAYS = ((2, 1), (1, 2))  # (processes, threads per process); the faster one counts
TARGET = 0.8  # minimum fraction of the limit


def run(context: Context, log=print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    program, part = context.steps(40, 2), context.steps(6, 1)
    contenders = {
        topology: lambda topology=topology: context.ours("impala", "program", topology, "--seconds", program)
        for topology in TOPOLOGIES
    }
    for name in () if context.only_ours else (*PARTS, "loop"):
        for way in WAYS:
            options = ("--processes", way[0], "--threads", way[1], "--seconds", part)
            contenders[f"{name} {way}"] = lambda name=name, options=options: context.ours(
                "impala", "part", name, *options
            )
    results, failures = run_interleaved(contenders, context.repeats, log)

    def value(name: str) -> float | None:
        return median(result["steps_per_second"] for result in results.get(name, ()))

    def best(name: str, title: str) -> Row:
        values = {way: found for way in WAYS if (found := value(f"{name} {way}"))}
        if not values:
            return Row(title, None, note=failures.get(f"{name} {WAYS[0]}", ""))
        way = max(values, key=lambda way: values[way])
        return Row(title, values[way], note="one process" if way[0] == 1 else f"{way[0]} processes")

    parts, loop = [best(name, title) for name, title in PARTS.items()], best("loop", LOOP)
    limit = max(filter(None, (sequential_rate([row.value for row in parts]), loop.value)), default=None)
    limits = (Row("the limit: the better of parts and loop", limit, TARGET), loop, *parts)
    return [
        Table(
            f"IMPALA on Pong-v5, Nature CNN, 2 actors, {topology}",
            "environment steps/s",
            Row("rlframe train", value(topology), None, failures.get(topology, ""), processor(results[topology])),
            limits,
        )
        for topology in TOPOLOGIES
    ]


def sequential_rate(rates: list[float | None]) -> float | None:
    """Return the combined steps/s of parts that run in sequence and reach `rates` alone."""
    return 1.0 / sum(1.0 / rate for rate in rates if rate) if all(rates) else None
