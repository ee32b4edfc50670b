"""Programs of several processes under each engine: steps a second on CartPole, and how soon they learn."""

from __future__ import annotations

import functools
from collections.abc import Callable

from benchmarks.context import Context, in_turns
from benchmarks.report import Row, Table, middle
from rlframe import extras

# And the extras that they need. The first is compared; ray with launchpad, under heavy_env alone.
ENGINES = {"local": (), "launchpad": ("launchpad",), "ray": ("ray",)}
# (agent, topology) -> environment steps of a run, and the least of launchpad's steps a second that local is to reach.
PROGRAMS = {
    ("ppo", "heavy_env"): (150_000, 0.95),
    ("impala", "heavy_env"): (200_000, 0.95),
    ("impala", "light_env"): (150_000, 1.1),
    ("dqn", "light_env"): (40_000, 0.95),
    ("impala", "distributed"): (100_000, 0.95),  # launchpad's has Reverb, local's the replay service
    ("impala", "elastic"): (150_000, 0.95),
}
RAY = 0.8  # of launchpad's steps a second under heavy_env
RLLIB, RLLIB_STEPS = 3.0, {"impala": 30_000, "ppo": 15_000}  # of RLlib's steps a second, and its steps
# DQN's updates a second under elastic, of those under heavy_env.
ELASTIC, STEPS = 0.8, 60_000


def run(context: Context, say: Callable[[str], None] = print) -> list[Table]:
    """Measures; see `benchmarks.runner`."""
    tables = [table for program in PROGRAMS for table in _measure(context, *program, say)]
    return [*tables, _elastic(context, say), *(_rllib(context, agent, say) for agent in RLLIB_STEPS)]


def _measure(context: Context, agent: str, topology: str, say: Callable[[str], None]) -> list[Table]:
    steps, least = PROGRAMS[agent, topology]
    count = context.steps(steps, 10_000)
    runs = {
        engine: functools.partial(context.ours, "program", agent, topology, engine, "--steps", count)
        for engine, needs in ENGINES.items()
        if all(map(extras.is_installed, needs)) and (engine != "ray" or topology == "heavy_env")
    }
    results, failures = in_turns(runs, context.repeats, say)

    def row(engine: str, what: str, wanted: float | None = None) -> Row:
        value = middle(turn.get(what) for turn in results[engine])
        return Row(engine, value, wanted, failures.get(engine, ""))

    def table(title: str, unit: str, what: str, wanted: float, higher_is_better: bool) -> Table:
        ours, *others = (row(engine, what, wanted if engine == "launchpad" else None) for engine in results)
        return Table(title, unit, ours, tuple(others), higher_is_better=higher_is_better)

    title = f"{agent} on CartPole-v1 under {topology}, two actors"
    tables = [
        table(title, "env steps/s", "steps_per_second", least, True),
        table(f"{title}: from the command to the first update", "s", "until_first_update", 1.0, False),
    ]
    if {"ray", "launchpad"} <= set(results):
        ray, launchpad = row("ray", "steps_per_second"), row("launchpad", "steps_per_second", RAY)
        tables.append(Table(f"{title}, engine ray", "env steps/s", ray, (launchpad,)))
    return tables


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


def _rllib(context: Context, agent: str, say: Callable[[str], None]) -> Table:
    """Beside RLlib's two env runners: the same environments, unrolls, batches, epochs and network; and its own."""
    steps = context.steps(RLLIB_STEPS[agent], 2_000)
    peer = functools.partial(context.peer, "rllib_cartpole", agent, "--warm-up", context.steps(5_000, 500))
    runs = {
        "rlframe": functools.partial(
            context.ours, "program", agent, "heavy_env", "local", "--steps", context.steps(150_000, 10_000)
        ),
        "RLlib, the same settings": functools.partial(peer, "--steps", steps),
        "RLlib, its own batches": functools.partial(peer, "--steps", steps, "--own"),
    }
    results, failures = in_turns(runs, context.repeats, say)
    ours, *others = (
        Row(
            name,
            middle(turn.get("steps_per_second") for turn in turns),
            RLLIB if name == "RLlib, the same settings" else None,
            failures.get(name, ""),
        )
        for name, turns in results.items()
    )
    return Table(f"{agent} on CartPole-v1, two actors on the same cores", "env steps/s", ours, tuple(others))
