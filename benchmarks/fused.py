"""PPO and DQN on CartPole-v1 under the topology fused: steps per second after compilation, and compile time.

PPO has the settings of PureJaxRL's `ppo.py`, with 128 steps per update. Its linear learning rate, epochs, minibatches
and networks are the same. Differences of PureJaxRL: it treats the time limit of 500 steps as a failure, it resets in
the step in which an episode ends, and it writes no logs and no files. gymnax computes a reset of every environment at
every step.

JAX 0.5.3 compiles for XLA's default CPU runtime. rlframe chooses the older one for small networks, so PureJaxRL is also
measured with it. At 64 x 128, XLA then fails to compile PureJaxRL (in oneDNN).
"""

from __future__ import annotations

from typing import Any

from benchmarks.context import OLD_RUNTIME, Context, run_interleaved
from benchmarks.report import Row, Table, median, processor

JAX_CARTPOLE = "jax:CartPole-v1"
SEEDS = 16
# environments -> (steps of the compiled loops, steps of single_process, target against PureJaxRL, single_process)
PPO = {4: (500_000, 100_000, 1.0, 4.0), 64: (2_000_000, 500_000, 1.15, 2.4)}
LEARNING_STARTS, WARM_UP = 10_000, 2_000  # of DQN, see `dqn_cartpole`


def run(context: Context, log=print) -> list[Table]:
    """Run the benchmark; see `benchmarks.runner`."""
    tables = [table for num_envs in PPO for table in _ppo(context, log, num_envs)]
    return [*tables, _dqn(context, log), _seeds(context, log)]


def _ppo(context: Context, log, num_envs: int) -> list[Table]:
    fast, slow, against_peer, against_ours = PPO[num_envs]
    fast, slow = context.steps(fast, fast // 5), context.steps(slow, slow // 5)

    def ours(steps: int, env: str, topology: str) -> dict[str, Any]:
        return _train(context, f"ppo_purejaxrl_{num_envs}", steps, fast, steps // 10, env, topology)

    peer = ("--num-envs", num_envs, "--steps", fast)
    contenders = {
        "rlframe, fused": lambda: ours(fast, JAX_CARTPOLE, "fused"),
        f"rlframe, single_process, {JAX_CARTPOLE}": lambda: ours(slow, JAX_CARTPOLE, "single_process"),
        "rlframe, single_process, CartPole-v1": lambda: ours(slow, "CartPole-v1", "single_process"),
        "PureJaxRL": lambda: context.purejaxrl_ppo(*peer),
        "PureJaxRL, XLA's older runtime": lambda: context.purejaxrl_ppo(*peer, env=OLD_RUNTIME),
    }
    targets = dict(zip(list(contenders)[1:], (against_ours, against_ours, against_peer), strict=False))
    results, failures = run_interleaved(contenders, context.repeats, log)
    title = f"PPO on CartPole-v1, settings of PureJaxRL, {num_envs} x 128"
    speed = _rows(results, failures, "steps_per_second", targets)
    # Twice the compile time is half as good.
    compiled = _rows(results, failures, "compile_seconds", {"PureJaxRL": 0.5})
    compiled = [row for row in compiled if "single_process" not in row.name]
    return [
        Table(f"{title}, after compilation", "environment steps/s", speed[0], tuple(speed[1:])),
        Table(f"{title}, compilation", "s", compiled[0], tuple(compiled[1:]), higher_is_better=False),
    ]


def _dqn(context: Context, log) -> Table:
    steps = context.steps(100_000, 20_000)

    def ours(env: str, topology: str) -> dict[str, Any]:
        return _train(context, "dqn_8", steps, steps, LEARNING_STARTS + WARM_UP, env, topology)

    contenders = {
        "rlframe, fused": lambda: ours(JAX_CARTPOLE, "fused"),
        f"rlframe, single_process, {JAX_CARTPOLE}": lambda: ours(JAX_CARTPOLE, "single_process"),
        "rlframe, single_process, CartPole-v1": lambda: ours("CartPole-v1", "single_process"),
    }
    results, failures = run_interleaved(contenders, context.repeats, log)
    rows = _rows(results, failures, "steps_per_second", dict.fromkeys(list(contenders)[1:], 3.0))
    title = "DQN on CartPole-v1, settings of CleanRL, 8 environments"
    return Table(title, "environment steps/s", rows[0], tuple(rows[1:]))


def _seeds(context: Context, log) -> Table:
    """Measure 16 seeds in one process. In 10 times the time of one seed, they make 1.6 times its steps per second."""
    steps = context.steps(500_000, 100_000)
    contenders = {
        f"rlframe, {SEEDS} seeds": lambda: context.ours("seeds", "--seeds", f"1-{SEEDS}", "--steps", steps),
        "rlframe, one seed": lambda: _train(
            context, "ppo_purejaxrl_4", steps, steps, steps // 10, JAX_CARTPOLE, "fused"
        ),
    }
    results, failures = run_interleaved(contenders, context.repeats, log)
    rows = _rows(results, failures, "steps_per_second", {"rlframe, one seed": SEEDS / 10})
    title = f"PPO on CartPole-v1, settings of PureJaxRL, 4 x 128, {SEEDS} seeds in one process"
    return Table(title, "environment steps/s of all seeds together", rows[0], tuple(rows[1:]))


def _train(
    context: Context, name: str, steps: int, total: int, warm_up: int, env: str, topology: str
) -> dict[str, Any]:
    numbers = ("--steps", steps, "--total", total, "--warm-up", warm_up, "--log-every", max(steps // 50, 1))
    return context.ours("train", name, *numbers, "--env", env, "--topology", topology)


def _rows(
    results: dict[str, list[dict[str, Any]]], failures: dict[str, str], quantity: str, targets: dict[str, float]
) -> list[Row]:
    return [
        Row(
            name,
            median(result.get(quantity) for result in found),
            targets.get(name),
            failures.get(name, ""),
            processor(found) if quantity == "steps_per_second" else None,
        )
        for name, found in results.items()
    ]
