"""IMPALA on EnvPool's Pong-v5 with two actors, at the preset, against what it does on the same cores without a program.

Every step is learned from once, so the limit is a step of the environment, of inference and of learning one after the
other, each as quick as all cores do it alone; or a bare loop of the three in a process, where that is quicker.
"""

from __future__ import annotations

from benchmarks.context import Context, in_turns
from benchmarks.report import Row, Table, middle, processor

TOPOLOGIES = ("heavy_env", "light_env")
PARTS = {"env": "environments alone", "inference": "inference alone", "learner": "learner steps alone"}
LOOP = "a bare loop of the three"
WAYS = ((2, 1), (1, 2))  # (processes, threads of each); the quicker counts
WANTED = 0.8  # of the limit


def run(context: Context, say=print) -> list[Table]:
    """Measures; see `benchmarks.runner`."""
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
    results, failures = in_turns(contenders, context.repeats, say)

    def value(name: str) -> float | None:
        return middle(result["steps_per_second"] for result in results.get(name, ()))

    def best(name: str, title: str) -> Row:
        values = {way: found for way in WAYS if (found := value(f"{name} {way}"))}
        if not values:
            return Row(title, None, note=failures.get(f"{name} {WAYS[0]}", ""))
        way = max(values, key=lambda way: values[way])
        return Row(title, values[way], note="one process" if way[0] == 1 else f"{way[0]} processes")

    parts, loop = [best(name, title) for name, title in PARTS.items()], best("loop", LOOP)
    limit = max(filter(None, (in_turn([row.value for row in parts]), loop.value)), default=None)
    limits = (Row("the limit: the better of the two ways", limit, WANTED), loop, *parts)
    return [
        Table(
            f"IMPALA on Pong-v5, Nature CNN, 2 actors, {topology}",
            "environment steps/s",
            Row("rlframe train", value(topology), None, failures.get(topology, ""), processor(results[topology])),
            limits,
        )
        for topology in TOPOLOGIES
    ]


def in_turn(rates: list[float | None]) -> float | None:
    """Steps/s of doing for each step one thing after the other, which alone reach `rates`."""
    return 1.0 / sum(1.0 / rate for rate in rates if rate) if all(rates) else None
