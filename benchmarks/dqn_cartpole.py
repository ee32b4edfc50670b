"""DQN on CartPole-v1 at the settings of CleanRL's dqn_jax.py: one update of 128 transitions every 10 steps.

CleanRL acts at random as often as its schedule says, which spares it the network; the schedule is run through in each
measurement, and the clock starts 2,000 steps after learning does.
"""

from __future__ import annotations

from benchmarks.context import Context, in_turns
from benchmarks.report import Row, Table, middle, processor

LEARNING_STARTS, WARM_UP = 10_000, 2_000


def run(context: Context, say=print) -> list[Table]:
    """Measures; see `benchmarks.runner`."""
    steps = context.steps(50_000, 20_000)
    ours = ("--steps", steps, "--total", steps, "--warm-up", LEARNING_STARTS + WARM_UP)
    contenders = {
        "rlframe, 1 environment": lambda: context.ours("train", "dqn_1", *ours),
        "rlframe, 8 environments": lambda: context.ours("train", "dqn_8", *ours),
        "CleanRL dqn_jax, 1 environment": lambda: context.cleanrl_script(
            "dqn_jax",
            ("--line-steps", 100, "--skip-lines", WARM_UP // 100),
            ("--total-timesteps", steps),
        ),
    }
    results, failures = in_turns(contenders, context.repeats, say)
    values = {name: middle(result.get("steps_per_second") for result in results[name]) for name in contenders}
    peer = "CleanRL dqn_jax, 1 environment"
    return [
        Table(
            f"DQN on CartPole-v1, settings of CleanRL, {name.partition(', ')[2]}",
            "environment steps/s",
            Row(name, values[name], None, failures.get(name, ""), processor(results[name])),
            (Row(peer, values[peer], wanted, failures.get(peer, "")),),
        )
        for name, wanted in (("rlframe, 1 environment", 1.5), ("rlframe, 8 environments", 3.0))
    ]
