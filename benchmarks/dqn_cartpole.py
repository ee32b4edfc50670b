"""DQN on CartPole-v1 with the settings of CleanRL's dqn_jax.py: one update of 128 transitions every 10 steps.

CleanRL does not call the network for random actions. Each measurement covers the whole exploration schedule. The clock
starts 2,000 steps after learning starts.
"""

from __future__ import annotations

from benchmarks.context import Context, run_interleaved
from benchmarks.report import Row, Table, median, processor

LEARNING_STARTS, WARM_UP = 10_000, 2_000


def run(context: Context, log=print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
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
    results, failures = run_interleaved(contenders, context.repeats, log)
    values = {name: median(result.get("steps_per_second") for result in results[name]) for name in contenders}
    peer = "CleanRL dqn_jax, 1 environment"
    return [
        Table(
            f"DQN on CartPole-v1, settings of CleanRL, {name.partition(', ')[2]}",
            "environment steps/s",
            Row(name, values[name], None, failures.get(name, ""), processor(results[name])),
            (Row(peer, values[peer], target, failures.get(peer, "")),),
        )
        for name, target in (("rlframe, 1 environment", 1.5), ("rlframe, 8 environments", 3.0))
    ]
