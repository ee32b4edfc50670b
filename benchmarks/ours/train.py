"""Train with rlframe as `rlframe train` does, including logs and files, and time it. Print one JSON object.

python -m benchmarks.ours.train ppo_cartpole --steps 60000 --warm-up 6000
python -m benchmarks.ours.train ppo_cartpole --steps 100000 --solve-every 4096
python -m benchmarks.ours.train ppo_purejaxrl_4 --steps 100000 --env jax:CartPole-v1 --topology fused
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.ours import simulate_devices
from benchmarks.processor import processor_seconds

if TYPE_CHECKING:
    from rlframe.programs.training.callbacks import CallbackInfo

STARTED = float(os.environ.get("RLFRAME_BENCH_STARTED", time.time()))  # includes the start of the interpreter


# A number at the end of a name is the number of environments: ppo_purejaxrl_N, pqn_N, dqn_1, dqn_8.
EXPERIMENTS = re.compile(r"ppo_cartpole|ppo_pong|ppo_purejaxrl_\d+|pqn_\d+|dqn_1|dqn_8|sac")


def experiment(
    name: str,
    seed: int,
    steps: int,
    log_every: int,
    eval_every: int,
    total: int,
    env: str = "CartPole-v1",
    topology: str = "single_process",
    devices: int = 1,
) -> Any:
    """Return the experiment `name`, with the settings of the peers. `env` is another version of CartPole."""
    if not EXPERIMENTS.fullmatch(name):
        raise ValueError(f"There is no experiment {name!r}.")
    from rlframe.agents import DQNConfig, PPOConfig
    from rlframe.agents.networks import MLPConfig
    from rlframe.programs import make_experiment

    common = {
        "seed": seed,
        "steps": steps,
        "log_every": log_every,
        "eval_every": eval_every,
        "checkpoint_every": 0,
        "schedule_steps": total,
        "topology": topology,
        **({"learner_devices": devices} if devices > 1 else {}),  # older checkouts do not have this option
    }
    if name == "ppo_cartpole":
        # the value of rl-baselines3-zoo, also used for the peers
        return make_experiment("ppo", env, gae_lambda=0.8, **common)
    # With `--against`, this file also measures checkouts that had no schedules and heads of DQN.
    has_schedules = "anneal_learning_rate" not in PPOConfig.__dataclass_fields__
    if name.startswith("ppo_purejaxrl"):  # settings of PureJaxRL's ppo.py
        old = {"learning_rate": 2.5e-4, "anneal_learning_rate": True}
        return make_experiment(
            "ppo",
            env,
            preset="none",
            network="mlp",
            network_config=MLPConfig(hidden=(64, 64), activation="tanh", separate=True, orthogonal=True),
            num_envs=int(name.rpartition("_")[2]),
            unroll_length=128,
            num_epochs=4,
            num_minibatches=4,
            discount=0.99,
            gae_lambda=0.95,
            clip_epsilon=0.2,
            value_clip=0.2,
            entropy_cost=0.01,
            value_cost=0.5,
            max_grad_norm=0.5,
            adam_epsilon=1e-5,
            **({"learning_rate": "linear:2.5e-4:0"} if has_schedules else old),
            **common,
        )
    if name.startswith("pqn"):
        return make_experiment("pqn", env, num_envs=int(name.rpartition("_")[2]), eval_episodes=1, **common)
    if name == "ppo_pong":
        return make_experiment("ppo", "Pong-v5", **common)  # the preset is the same as CleanRL's
    if name == "sac":
        return make_experiment(
            "sac", "HalfCheetah-v4", preset="none", num_envs=1, env_type="envpool", eval_episodes=1, **common
        )
    old = {"epsilon_begin": 1.0, "epsilon_end": 0.05, "epsilon_decay_steps": total // 2}
    huber = "head_huber_threshold" if "head" in DQNConfig.__dataclass_fields__ else "huber_threshold"
    # Settings of CleanRL's dqn_jax.py. It counts environment steps where we count learner steps, one every 10 steps.
    return make_experiment(
        "dqn",
        env,
        preset="none",
        network="mlp",
        network_config=MLPConfig(hidden=(120, 84), activation="relu"),
        num_envs={"dqn_1": 1, "dqn_8": 8}[name],
        batch_size=128,
        replay_capacity=10_000,
        min_replay_size=9_000,  # CleanRL starts at 10,000 steps; our buffer also contains LAST timesteps
        update_period=10,
        target_update_period=50,  # 500 steps
        discount=0.99,
        **({"epsilon": f"linear:1:0.05@{total // 20}"} if has_schedules else old),
        optimizer="adam",
        learning_rate=2.5e-4,
        **{huber: None},
        **common,
    )


class Solved(Exception):
    """Raised when both measures show that CartPole is solved."""


class LogRow(NamedTuple):
    """The steps and the time of one row of the logs."""

    steps: int
    time: float
    processor: float  # seconds


class Watch:
    """A callback that records the time of each row of the logs, and when CartPole is solved by each measure."""

    def __init__(self, warm_up: int, solve: bool) -> None:
        self._warm_up = warm_up
        self._solve = solve
        self._returns: collections.deque[float] = collections.deque(maxlen=100)
        self._before = self.last = LogRow(0, 0.0, 0.0)
        self._evaluating = LogRow(0, 0.0, 0.0)  # the time spent in evaluations
        self.first: LogRow | None = None
        self.evaluated: dict[str, float] | None = None
        self.last_100: dict[str, float] | None = None

    def __call__(self, info: CallbackInfo) -> None:
        env_steps, values = info.step, info.values
        now = LogRow(env_steps, time.time(), processor_seconds())
        if "return_mean" in values:
            # The row of the logs directly precedes the evaluation at the same step.
            _, before, processor = self._before
            self._evaluating = LogRow(
                0, self._evaluating.time + now.time - before, self._evaluating.processor + now.processor - processor
            )
            if values["return_mean"] >= 475 and self.evaluated is None:
                self.evaluated = self._when(now)
        else:
            if self.first is None and env_steps >= self._warm_up:
                self.first = now
            self.last = now
            self._returns.extend([values.get("episode_return", 0.0)] * values.get("episodes", 0))
            full = len(self._returns) == 100
            if full and sum(self._returns) / 100 >= 475 and self.last_100 is None:
                self.last_100 = self._when(now)
        self._before = now
        if self._solve and self.evaluated and self.last_100:
            raise Solved

    def _when(self, now: LogRow) -> dict[str, float]:
        return {
            "steps": now.steps,
            "seconds": now.time - STARTED - self._evaluating.time,
            "processor_us": 1e6 * (now.processor - self._evaluating.processor) / now.steps,
        }


class CompileTimes:
    """Collects the times during which JAX traces, lowers and compiles functions."""

    def __init__(self) -> None:
        import jax

        self._intervals: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, seconds: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            now = time.time()
            self._intervals.append((now - seconds, now))

    def seconds(self, until: float) -> float:
        """Return the seconds before the time `until`."""
        return covered_seconds(interval for interval in self._intervals if interval[1] <= until)


def covered_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the duration of the union of (start, end). Nested intervals count once."""
    total, covered = 0.0, 0.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("experiment")
    parser.add_argument("--steps", type=int, required=True, help="environment steps to run")
    parser.add_argument("--warm-up", type=int, default=0, help="steps before the clock starts, included in --steps")
    parser.add_argument("--total", type=int, default=100_000, help="steps of the schedules")
    parser.add_argument("--log-every", type=int, default=1024)
    parser.add_argument("--solve-every", type=int, default=0, help="steps between evaluations; stop when solved")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--topology", default="single_process")
    parser.add_argument("--devices", type=int, default=1, help="devices that share each update")
    args = parser.parse_args()
    simulate_devices(args.devices)

    from rlframe import programs

    train = getattr(programs, "run_experiment", None) or programs.train  # its name in older checkouts

    options = (
        args.seed,
        args.steps,
        args.log_every,
        args.solve_every,
        args.total,
        args.env,
        args.topology,
        args.devices,
    )
    described = experiment(args.experiment, *options)
    compiling = CompileTimes()
    watch = Watch(args.warm_up, bool(args.solve_every))
    with tempfile.TemporaryDirectory() as directory, contextlib.suppress(Solved):
        train(described, run_dir=os.path.join(directory, "run"), callbacks=[watch])
    result: dict[str, Any] = {"steps": watch.last.steps}
    if args.solve_every:
        result.update(evaluated=watch.evaluated, last_100=watch.last_100)
    elif watch.first is not None:
        steps, seconds, processor = (end - start for start, end in zip(watch.first, watch.last, strict=True))
        result.update(steps_per_second=steps / seconds, processor_us=1e6 * processor / steps)
        result.update(compile_seconds=compiling.seconds(until=watch.first.time))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
