"""PPO on EnvPool's Pong-v5 (4 x 84 x 84) with the Nature CNN, at the settings of CleanRL's ppo_atari_envpool.py.

8 environments x 128 steps, 4 epochs x 4 minibatches. All play EnvPool's Pong; the peers' newer Python has a
newer EnvPool.
"""

from __future__ import annotations

from benchmarks.context import Context, in_turns
from benchmarks.report import Row, Table, middle, processor

UNROLL = 1024  # 8 environments x 128 steps
TOTAL = 10_000_000  # steps over which the learning rate falls


def run(context: Context, say=print) -> list[Table]:
    """Measures; see `benchmarks.runner`."""
    steps = UNROLL * context.steps(8, 3)
    contenders = {
        # Steps whose action is ignored are not counted, so an unroll may hold a few fewer than 1,024.
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
    wanted = {"CleanRL ppo_atari_envpool (torch)": 0.95, "Stable-Baselines3": 1.0}
    results, failures = in_turns(contenders, context.repeats, say)
    rows = [
        Row(
            name,
            middle(result.get("steps_per_second") for result in results[name]),
            wanted.get(name),
            failures.get(name, ""),
            processor(results[name]),
        )
        for name in contenders
    ]
    title = "PPO on Pong-v5, Nature CNN, settings of CleanRL, after warm-up"
    return [Table(title, "environment steps/s", rows[0], tuple(rows[1:]))]
