"""Multi-process programs with each engine: steps per second on CartPole, and the time until learning starts."""

from __future__ import annotations

import functools
from collections.abc import Callable

from benchmarks.context import Context, run_interleaved
from benchmarks.report import Row, Table, median
from rlframe import extras

# engine -> required extras. The first engine is compared with the others. ray (with launchpad) only runs under
# heavy_env.
ENGINES = {"local": (), "launchpad": ("launchpad",), "ray": ("ray",)}
# (agent, topology) -> environment steps of a run, and the target of local's steps/s as a multiple of launchpad's.
PROGRAMS = {
    ("ppo", "heavy_env"): (150_000, 0.95),
    ("impala", "heavy_env"): (200_000, 0.95),
    ("impala", "light_env"): (150_000, 1.1),
    ("dqn", "light_env"): (40_000, 0.95),
    ("impala", "distributed"): (100_000, 0.95),  # launchpad uses Reverb, local the replay service
    ("impala", "elastic"): (150_000, 0.95),
}
RAY = 0.8  # target as a multiple of launchpad's steps/s under heavy_env
# target as a multiple of RLlib's steps/s; steps of RLlib's runs
RLLIB, RLLIB_STEPS = 3.0, {"impala": 30_000, "ppo": 15_000}
# Target of DQN's updates/s under elastic, as a multiple of those under heavy_env; steps of a run.
ELASTIC, STEPS = 0.8, 60_000


def run(context: Context, log: Callable[[str], None] = print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    tables = [table for program in PROGRAMS for table in _measure(context, *program, log)]
    return [*tables, _elastic(context, log), *(_rllib(context, agent, log) for agent in RLLIB_STEPS)]


def _measure(context: Context, agent: str, topology: str, log: Callable[[str], None]) -> list[Table]:
    steps, least = PROGRAMS[agent, topology]
    count = context.steps(steps, 10_000)
    runs = {
        engine: functools.partial(context.ours, "program", agent, topology, engine, "--steps", count)
        for engine, needs in ENGINES.items()
        if all(map(extras.is_installed, needs)) and (engine != "ray" or topology == "heavy_env")
    }
    results, failures = run_interleaved(runs, context.repeats, log)

    def row(engine: str, key: str, target: float | None = None) -> Row:
        value = median(turn.get(key) for turn in results[engine])
        return Row(engine, value, target, failures.get(engine, ""))

    def table(title: str, unit: str, key: str, target: float, higher_is_better: bool) -> Table:
        ours, *others = (row(engine, key, target if engine == "launchpad" else None) for engine in results)
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


def _elastic(context: Context, log: Callable[[str], None]) -> Table:
    steps = context.steps(STEPS, 10_000)
    runs = {
        topology: functools.partial(context.ours, "program", "dqn", topology, "local", "--steps", steps)
        for topology in ("elastic", "heavy_env")
    }
    results, failures = run_interleaved(runs, context.repeats, log)
    ours, other = (
        Row(
            topology,
            median(turn.get("updates_per_second") for turn in turns),
            ELASTIC if topology == "heavy_env" else None,
            failures.get(topology, ""),
        )
        for topology, turns in results.items()
    )
    return Table("dqn on CartPole-v1, two actors, engine local", "updates/s", ours, (other,))


def _rllib(context: Context, agent: str, log: Callable[[str], None]) -> Table:
    """Compare with RLlib's two env runners.

    Once with the same environments, unrolls, batches, epochs and network, and once with RLlib's own batches.
    """
    steps = context.steps(RLLIB_STEPS[agent], 2_000)
    peer = functools.partial(context.peer, "rllib_cartpole", agent, "--warm-up", context.steps(5_000, 500))
    runs = {
        "rlframe": functools.partial(
            context.ours, "program", agent, "heavy_env", "local", "--steps", context.steps(150_000, 10_000)
        ),
        "RLlib, the same settings": functools.partial(peer, "--steps", steps),
        "RLlib, its own batches": functools.partial(peer, "--steps", steps, "--own"),
    }
    results, failures = run_interleaved(runs, context.repeats, log)
    ours, *others = (
        Row(
            name,
            median(turn.get("steps_per_second") for turn in turns),
            RLLIB if name == "RLlib, the same settings" else None,
            failures.get(name, ""),
        )
        for name, turns in results.items()
    )
    return Table(f"{agent} on CartPole-v1, two actors on the same cores", "env steps/s", ours, tuple(others))
