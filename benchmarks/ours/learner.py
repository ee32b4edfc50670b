"""Time the updates of a learner whose devices share each update. Prints one JSON object.

Without accelerators, the devices are simulated. All of them use the same threads of the CPU.

python -m benchmarks.ours.learner ppo --devices 2 --seconds 5
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from typing import Any

from benchmarks.ours import simulate_devices


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", choices=("ppo", "ppo_large", "sac", "dqn_fused"))
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    simulate_devices(args.devices)
    if args.config == "dqn_fused":
        found = measure_fused(args.devices, args.seconds)
    else:
        found = measure_learner(args.config, args.devices, args.seconds)
    print(json.dumps(found))


def measure_learner(config: str, devices: int, seconds: float) -> dict[str, Any]:
    """Return updates per second, processor time per update, and the bytes that an update moves between devices.

    `moved_bytes` is the sum over the communication in the compiled update. A loop counts once, so for PPO it contains
    one gradient step.
    """
    import jax
    import numpy as np

    from rlframe.agents import PPO, SAC, PPOConfig, SACConfig
    from rlframe.agents.networks import MLPConfig
    from rlframe.learners import Learner, LearnerConfig
    from rlframe.replay.layout import batch_shapes
    from rlframe.types import specs

    observation, action = specs.Array((8,), np.float32), specs.DiscreteArray(4)
    if config == "sac":
        box = specs.BoundedArray((2,), np.float32, -np.ones(2, np.float32), np.ones(2, np.float32))
        agent: Any = SAC(SACConfig(), observation, box)
    else:
        cfg = PPOConfig(unroll_length=128, num_epochs=4, num_minibatches=4, total_learner_steps=1_000_000)
        hidden = (512, 512) if config == "ppo_large" else (64, 64)
        agent = PPO(cfg, observation, action, net_factory=MLPConfig(hidden=hidden))
    rng = np.random.default_rng(0)

    def random(leaf: Any) -> np.ndarray:
        if leaf.dtype == np.float32:
            return rng.random(leaf.shape, np.float32)
        return np.ones(leaf.shape, leaf.dtype)

    batch = jax.tree.map(random, batch_shapes(agent, 64))
    batch = batch._replace(keys=(), params_version=np.zeros(len(jax.tree.leaves(batch.data)[0]), np.int64))
    learner = Learner(LearnerConfig(devices=devices), agent, None)
    moved = _moved_bytes(learner, batch)

    def update() -> int:
        learner.step(batch)
        return 1

    for _ in range(3):  # compile
        update()
    learner.wait_for_update()
    found = _timed(update, learner.wait_for_update, seconds)
    learner.close()
    return {**found, "moved_bytes": moved}


def measure_fused(devices: int, seconds: float) -> dict[str, Any]:
    """Return the figures of `measure_learner` for a prioritized DQN in `fused`, with updates in jitted rounds.

    The devices also share the environments and the replay. `moved_bytes` also contains the steps in the environments,
    and the batch that is sampled from the replay.
    """
    call, limits, carry = fused_dqn(devices)

    def update() -> int:
        nonlocal carry
        carry = call(carry, limits)
        return int(carry.tally.updates)

    update()
    return {**_timed(update, lambda: None, seconds), "moved_bytes": sum(traffic(call.as_text()).values())}


def fused_dqn(devices: int, capacity: int = 10_000) -> tuple[Any, Any, Any]:
    """Return (call, limits, carry): `call(carry, limits)` makes 1,000 rounds of a prioritized DQN."""
    import jax
    import numpy as np

    from rlframe.agents import DQN, DQNConfig
    from rlframe.agents.networks import MLPConfig
    from rlframe.device.driver import CompiledRounds
    from rlframe.device.rounds import CallLimits, Start
    from rlframe.envs.jax_env import BatchedJaxEnv
    from rlframe.envs.jax_envs import make_jax_env
    from rlframe.envs.jax_pool import env_keys
    from rlframe.learners.update import InitialState
    from rlframe.sharding import LearnerDevices

    envs, shared = BatchedJaxEnv(make_jax_env("jax:CartPole-v1", {}), 1, 1, None), LearnerDevices(devices)
    cfg = DQNConfig(
        prioritized=True,
        total_learner_steps=1_000_000,
        min_replay_size=1_000,
        replay_capacity=capacity,
        batch_size=256,
    )
    specs = envs.codec.observation_spec, envs.codec.action_spec
    agent = DQN(cfg, *specs, net_factory=MLPConfig(hidden=(64, 64)))
    compiled = CompiledRounds(agent, envs, 64, None, shared)
    params, learner_state, _ = shared.put_state(InitialState(agent).make(seed=0))
    start = Start(jax.random.PRNGKey(0), params, learner_state, env_keys(0, 64))
    carry, limits = compiled.init(*start), CallLimits(*np.array([1_000, 10_000_000, 1_000, 1_000], np.int32))
    with shared.dividing():
        call = jax.jit(compiled.rounds.run, donate_argnums=(0,)).lower(carry, limits).compile()
    return call, limits, carry


def _timed(update: Callable[[], int], wait: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """Call `update`, which returns its number of updates, for about `seconds` seconds. Return the rates."""
    from benchmarks.processor import Stopwatch

    watch, updates = Stopwatch(), 0
    while watch.seconds < seconds:
        updates += update()
    wait()
    rate = watch.rate(updates)
    return {"updates_per_second": rate["steps_per_second"], "processor_us": rate["processor_us"]}


def _moved_bytes(learner: Any, batch: Any) -> int:
    import jax

    update = learner._update
    args = (*learner.state, update.put(batch), learner._actor_arrays)
    with learner.devices.dividing():
        return sum(traffic(jax.jit(update._update).lower(*args).compile().as_text()).values())


def traffic(compiled: str) -> dict[str, int]:
    """Return operation -> bytes that it returns on each device, for the communication in compiled code."""
    sizes = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8}
    found: dict[str, int] = {}
    compiled = re.sub(r"/\*.*?\*/", "", compiled)  # XLA numbers the elements of long tuples
    operations = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    for shapes, operation in re.findall(rf"= (\(?[^=]*?\)?) ({operations})(?:-start)?\(", compiled):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            size = sizes[dtype]
            for length in filter(None, shape.split(",")):
                size *= int(length)
            found[operation] = found.get(operation, 0) + size
    return found


if __name__ == "__main__":
    main()
