"""Time the updates of a Learner whose devices share each update. Prints one JSON object.

Without accelerators, the devices are simulated. All of them use the same threads of the CPU.

python -m benchmarks.ours.learner ppo --devices 2 --seconds 5
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from benchmarks.ours import simulate_devices


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", choices=("ppo", "ppo_large", "sac"))
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    simulate_devices(args.devices)
    print(json.dumps(measure(args.config, args.devices, args.seconds)))


def measure(config: str, devices: int, seconds: float) -> dict[str, Any]:
    """Return updates per second, processor time per update, and the bytes that an update moves between devices.

    `moved_bytes` is the sum over the communication in the compiled update. A loop counts once, so for PPO it contains
    one gradient step.
    """
    import jax
    import numpy as np

    from benchmarks.processor import Stopwatch
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
    for _ in range(3):  # compile
        learner.step(batch)
    learner.wait_for_update()
    watch, updates = Stopwatch(), 0
    while watch.seconds < seconds:
        learner.step(batch)
        updates += 1
    learner.wait_for_update()
    rate = watch.rate(updates)
    learner.close()
    found = {"updates_per_second": rate["steps_per_second"], "moved_bytes": moved, "devices": devices}
    return {**found, "processor_us": rate["processor_us"]}


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
