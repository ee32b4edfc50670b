"""PPO on CartPole-v1 with the settings of rl-baselines3-zoo: steps per second, and wall time until it is solved.

8 environments x 32 steps, 20 epochs with one minibatch of 256. The bare loop is one plain loop over the same libraries
(`peers/bare_ppo.py`), with both of XLA's CPU runtimes.
"""

from __future__ import annotations

from benchmarks.context import OLD_RUNTIME, Context, run_interleaved
from benchmarks.report import Row, Table, median, processor

EVALUATE_EVERY = 4096  # environment steps
ZOO = ("--num-envs", 8, "--num-steps", 32, "--num-minibatches", 1, "--update-epochs", 20, "--gae-lambda", 0.8)
ZOO += ("--gamma", 0.98, "--learning-rate", 1e-3, "--ent-coef", 0.0)


def run(context: Context, log=print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    return [_speed(context, log), *_solving(context, log)]


def _speed(context: Context, log) -> Table:
    fast = ("--steps", context.steps(100_000, 20_000), "--warm-up", 6_000)
    slow = context.steps(40_960, 10_240)
    contenders = {
        "rlframe": lambda: context.ours("train", "ppo_cartpole", *fast),
        "bare loop, XLA's older runtime": lambda: context.bare("bare_ppo", *fast, env=OLD_RUNTIME),
        "bare loop, XLA's default runtime": lambda: context.bare("bare_ppo", *fast),
        "bare loop, tuned as rlframe is": lambda: context.bare("bare_ppo", *fast, "--tuned", env=OLD_RUNTIME),
        "Stable-Baselines3": lambda: context.peer(
            "sb3_ppo", "cartpole", "--steps", slow, "--warm-up", 5_000, "--threads", 1
        ),
        "CleanRL, the same settings": lambda: context.cleanrl_script(
            "ppo",
            ("--line-steps", 256, "--skip-lines", 20, "--threads", 1),
            ("--total-timesteps", slow, *ZOO),
        ),
        "CleanRL, its own settings": lambda: context.cleanrl_script(
            "ppo", ("--line-steps", 512, "--skip-lines", 10, "--threads", 1), ("--total-timesteps", slow)
        ),
    }
    target = {
        "bare loop, XLA's older runtime": 0.8,
        "bare loop, XLA's default runtime": 0.8,
        "Stable-Baselines3": 5.0,
    }
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
    title = "PPO on CartPole-v1, settings of rl-baselines3-zoo, after warm-up"
    return Table(title, "environment steps/s", rows[0], tuple(rows[1:]))


def _solving(context: Context, log) -> list[Table]:
    """Measure the time until CartPole is solved, from the start of the process. The time of evaluations is excluded."""
    budget = context.steps(100_000, 20_000)
    until = ("--steps", budget, "--solve-every", EVALUATE_EVERY)
    seeds = {name: iter(range(1, 1_000)) for name in ("rlframe", "bare", "sb3")}
    contenders = {
        "rlframe": lambda: context.ours("train", "ppo_cartpole", *until, "--seed", next(seeds["rlframe"])),
        "bare loop, XLA's older runtime": lambda: context.bare(
            "bare_ppo", *until, "--seed", next(seeds["bare"]), env=OLD_RUNTIME
        ),
        "Stable-Baselines3": lambda: context.peer(
            "sb3_ppo", "cartpole", *until, "--warm-up", 0, "--threads", 1, "--seed", next(seeds["sb3"])
        ),
    }
    results, failures = run_interleaved(contenders, context.repeats, log)
    measures = {
        "last_100": "mean of the last 100 training episodes at 475",
        "evaluated": f"mean of 20 greedy episodes at 475, evaluated every {EVALUATE_EVERY} steps",
    }
    tables = []
    for key, measure in measures.items():
        for quantity, unit, factor in (
            ("seconds", "s, with import and compilation", 2.0),
            ("steps", "environment steps", 1.0),
        ):
            rows = []
            for name in contenders:
                solved = [result.get(key) or {} for result in results[name]]
                values = [found.get(quantity) for found in solved]
                note = failures.get(name) or _seeds_note(values)
                target = factor if name == "Stable-Baselines3" and key == "last_100" else None
                rows.append(Row(name, median(values), target, note, processor(solved)))
            title = f"PPO on CartPole-v1 until solved: {measure}"
            tables.append(Table(title, unit, rows[0], tuple(rows[1:]), higher_is_better=False))
    return tables


def _seeds_note(values: list[float | None]) -> str:
    solved = [value for value in values if value is not None]
    if len(solved) == len(values):
        return f"{min(solved):.4g} to {max(solved):.4g}"
    return f"{len(solved)} of {len(values)} seeds solved it"
