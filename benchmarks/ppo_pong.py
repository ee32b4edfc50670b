"""PPO on EnvPool's Pong-v5 (4 x 84 x 84) with the Nature CNN and the settings of CleanRL's ppo_atari_envpool.py.

8 environments x 128 steps, 4 epochs x 4 minibatches. All contenders play EnvPool's Pong, but the newer Python of the
peers has a newer EnvPool.
"""

from __future__ import annotations

from benchmarks.context import Context, run_interleaved
from benchmarks.report import Row, Table, median, processor

UNROLL = 1024  # 8 environments x 128 steps
TOTAL = 10_000_000  # steps in which the learning rate falls to 0


def run(context: Context, log=print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    steps = UNROLL * context.steps(8, 3)
    contenders = {
        # Steps with an ignored action are not counted, so an unroll may contain slightly fewer than 1,024 steps.
        "rlframe": lambda: context.ours(
            "train", "ppo_pong", "--steps", steps, "--warm-up", UNROLL, "--total", TOTAL, "--log-every", UNROLL
        ),
        "CleanRL ppo_atari_envpool (torch)": lambda: context.cleanrl_script(
            "ppo_atari_envpool",
            ("--line-steps", UNROLL, "--skip-lines", 0),
            ("--env-id", "Pong-v5", "--total-timesteps", steps),
        ),
        "Stable-Baselines3": lambda: context.peer("sb3_ppo", "pong", "--steps", steps, "--warm-up", UNROLL),
    }
    target = {"CleanRL ppo_atari_envpool (torch)": 0.95, "Stable-Baselines3": 1.0}
    results, failures = run_interleaved(contenders, context.repeats, log)
    rows = [
        Row(
            name,
            median(result.get("steps_per_second") for result in results[name]),
            target.get(name),
            failures.get(name, ""),
            processor(results[name]),
        )
        for name in contenders
    ]
    title = "PPO on Pong-v5, Nature CNN, settings of CleanRL, after warm-up"
    return [Table(title, "environment steps/s", rows[0], tuple(rows[1:]))]
