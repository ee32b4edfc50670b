"""Programs of several processes under each engine: steps a second on CartPole, and how soon they learn."""

from __future__ import annotations

import functools
from collections.abc import Callable

from benchmarks.context import Context, in_turns
from benchmarks.report import Row, Table, middle
from rlframe import extras

ENGINES = {"local": (), "launchpad": ("launchpad",)}  # and the extras that they need; the first one is compared
# (agent, topology) -> environment steps of a run, and the least of launchpad's steps a second that local is to reach.
PROGRAMS = {
    ("ppo", "heavy_env"): (150_000, 0.95),
    ("impala", "heavy_env"): (200_000, 0.95),
    ("impala", "light_env"): (150_000, 1.1),
    ("dqn", "light_env"): (40_000, 0.95),
    ("impala", "elastic"): (150_000, 0.95),
}
# DQN's updates a second under elastic, of those under heavy_env.
ELASTIC, STEPS = 0.8, 60_000


def run(context: Context, say: Callable[[str], None] = print) -> list[Table]:
    """Measures; see `benchmarks.runner`."""
    tables = [table for program in PROGRAMS for table in _measure(context, *program, say)]
    return [*tables, _elastic(context, say)]


def _measure(context: Context, agent: str, topology: str, say: Callable[[str], None]) -> list[Table]:
    steps, least = PROGRAMS[agent, topology]
    count = context.steps(steps, 10_000)
    runs = {
        engine: functools.partial(context.ours, "program", agent, topology, engine, "--steps", count)
        for engine, needs in ENGINES.items()
        if all(map(extras.is_installed, needs))
    }
    results, failures = in_turns(runs, context.repeats, say)

    def table(title: str, unit: str, what: str, wanted: float, higher_is_better: bool) -> Table:
        ours, *others = (
            Row(
                engine,
                middle(turn.get(what) for turn in turns),
                wanted if engine == "launchpad" else None,
                failures.get(engine, ""),
            )
            for engine, turns in results.items()
        )
        return Table(title, unit, ours, tuple(others), higher_is_better=higher_is_better)

    title = f"{agent} on CartPole-v1 under {topology}, two actors"
    return [
        table(title, "env steps/s", "steps_per_second", least, True),
        table(f"{title}: from the command to the first update", "s", "until_first_update", 1.0, False),
    ]


def _elastic(context: Context, say: Callable[[str], None]) -> Table:
    steps = context.steps(STEPS, 10_000)
    runs = {
        topology: functools.partial(context.ours, "program", "dqn", topology, "local", "--steps", steps)
        for topology in ("elastic", "heavy_env")
    }
    results, failures = in_turns(runs, context.repeats, say)
    ours, other = (
        Row(
            topology,
            middle(turn.get("updates_per_second") for turn in turns),
            ELASTIC if topology == "heavy_env" else None,
            failures.get(topology, ""),
        )
        for topology, turns in results.items()
    )
    return Table("dqn on CartPole-v1, two actors, engine local", "updates/s", ours, (other,))
