"""Other replay buffers with the workloads of `benchmarks/replay.py`.

Prints one JSON object: {row: {peer: microseconds}}. `benchmarks/replay.py` runs this script with an interpreter that
has the peers and needs no rlframe. Peers that cannot be imported are left out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

ENVS, BATCH, GAMMA = 64, 256, 0.99
CARTPOLE = ((4,), np.float32, 100_000)
PONG = ((4, 84, 84), np.uint8, 10_048)


class CallTimes(NamedTuple):
    """The duration of a call in microseconds."""

    least: float  # minimum wall time over short runs, because other work on the machine can only increase it
    processor: float  # mean processor time of this process


def measure(call: Callable[[], Any], seconds: float = 0.4) -> CallTimes:
    """Measure repeated calls for about `seconds`."""
    call()
    start = time.perf_counter()
    call()
    repeats = max(1, int(0.004 / max(1e-7, time.perf_counter() - start)))
    best, runs, processor, until = float("inf"), 0, time.process_time(), time.perf_counter() + seconds
    while time.perf_counter() < until:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        best, runs = min(best, (time.perf_counter() - start) / repeats), runs + 1
    return CallTimes(best * 1e6, 1e6 * (time.process_time() - processor) / max(1, runs * repeats))


def fill(insert: Callable[[], None], capacity: int) -> None:
    """Fill a buffer."""
    for _ in range(capacity // ENVS + 10):
        insert()


def data(shape: tuple[int, ...], dtype: Any, count: int = ENVS) -> dict[str, np.ndarray]:
    """Return a batch of transitions of `count` environments."""
    rng = np.random.default_rng(0)

    def make() -> np.ndarray:
        if dtype == np.uint8:
            return rng.integers(0, 255, (count, *shape)).astype(dtype)
        return rng.standard_normal((count, *shape)).astype(dtype)

    return {
        "obs": make(),
        "next_obs": make(),
        "act": rng.integers(0, 2, count).astype(np.int32),
        "rew": rng.standard_normal(count).astype(np.float32),
        "done": rng.random(count) < 0.02,
    }


def stable_baselines3(name: str, shape: tuple[int, ...], dtype: Any, capacity: int) -> dict[str, CallTimes]:
    """Measure with default options, which distinguish truncation from termination as rlframe does."""
    import gymnasium
    from stable_baselines3.common import buffers

    low, high = (0, 255) if dtype == np.uint8 else (-10, 10)
    spaces = gymnasium.spaces.Box(low, high, shape, dtype), gymnasium.spaces.Discrete(2)
    d, infos = data(shape, dtype), [{} for _ in range(ENVS)]

    def add() -> None:
        buffer.add(d["obs"], d["next_obs"], d["act"][:, None], d["rew"], d["done"], infos)

    buffer = buffers.ReplayBuffer(capacity, *spaces, device="cpu", n_envs=ENVS)
    fill(add, capacity)
    rows = {f"{name} insert 64": measure(add), f"{name} sample 256, 1-step": measure(lambda: buffer.sample(BATCH))}
    if name == "cartpole" and hasattr(buffers, "NStepReplayBuffer"):
        buffer = buffers.NStepReplayBuffer(capacity, *spaces, device="cpu", n_envs=ENVS, n_steps=3, gamma=GAMMA)
        fill(add, capacity)
        rows[f"{name} sample 256, 3-step"] = measure(lambda: buffer.sample(BATCH))
    return rows


def cpprb(name: str, shape: tuple[int, ...], dtype: Any, capacity: int) -> dict[str, CallTimes]:
    """Measure cpprb. Its n-step buffer supports only one environment, so 3-step sampling uses one stream."""
    import cpprb as library

    fields = {
        "obs": {"shape": shape, "dtype": dtype},
        "next_obs": {"shape": shape, "dtype": dtype},
        "act": {"dtype": np.int32},
        "rew": {"dtype": np.float32},
        "done": {"dtype": bool},
    }
    d, priorities = data(shape, dtype), np.random.default_rng(0).random(BATCH)
    buffer = library.ReplayBuffer(capacity, fields)
    fill(lambda: buffer.add(**d), capacity)
    rows = {
        f"{name} insert 64": measure(lambda: buffer.add(**d)),
        f"{name} sample 256, 1-step": measure(lambda: buffer.sample(BATCH)),
    }
    if name == "pong":
        return rows
    nstep = {"size": 3, "gamma": GAMMA, "rew": "rew", "next": "next_obs"}
    buffer = library.ReplayBuffer(capacity, fields, Nstep=nstep)
    fill(lambda: buffer.add(**d), capacity)
    rows[f"{name} sample 256, 3-step"] = measure(lambda: buffer.sample(BATCH))
    buffer = library.PrioritizedReplayBuffer(capacity, fields, alpha=0.6)
    fill(lambda: buffer.add(**d), capacity)
    rows[f"{name} insert 64, prioritized"] = measure(lambda: buffer.add(**d))
    rows[f"{name} sample + update 256, prioritized"] = measure(
        lambda: buffer.update_priorities(buffer.sample(BATCH, beta=0.4)["indexes"], priorities)
    )
    return rows


def flashbax(name: str, shape: tuple[int, ...], dtype: Any, capacity: int) -> dict[str, CallTimes]:
    """Measure jitted functions with donated state."""
    import flashbax as fbx
    import jax

    d = {key: value for key, value in data(shape, dtype).items() if key != "next_obs"}
    one, key = {field: value[0] for field, value in d.items()}, jax.random.PRNGKey(0)
    priorities = np.random.default_rng(0).random(BATCH).astype(np.float32)

    def measured(buffer: Any, batch: dict[str, np.ndarray], update: bool = False) -> tuple[CallTimes, CallTimes]:
        """Return the times of an insert and a sample. With `update`, the sample includes an update of priorities."""
        add, sample = jax.jit(buffer.add, donate_argnums=0), jax.jit(buffer.sample)
        set_priorities = jax.jit(buffer.set_priorities, donate_argnums=0) if update else None
        state = buffer.init(one)

        def insert() -> None:
            nonlocal state
            state = jax.block_until_ready(add(state, batch))

        def draw() -> None:
            nonlocal state
            drawn = jax.block_until_ready(sample(state, key))
            if set_priorities is not None:
                state = jax.block_until_ready(set_priorities(state, drawn.indices, priorities))

        fill(insert, capacity)
        return measure(insert), measure(draw)

    insert, draw = measured(fbx.make_flat_buffer(capacity, BATCH, BATCH, add_batch_size=ENVS), d)
    rows = {f"{name} insert 64": insert, f"{name} sample 256, 1-step": draw}
    if name == "pong":
        return rows
    three = fbx.make_trajectory_buffer(ENVS, BATCH, 4, 1, 4, max_size=capacity)
    rows[f"{name} sample 256, 3-step"] = measured(three, {field: value[:, None] for field, value in d.items()})[1]
    weighted = fbx.make_prioritised_flat_buffer(capacity, BATCH, BATCH, add_batch_size=ENVS)
    insert, draw = measured(weighted, d, update=True)
    rows[f"{name} insert 64, prioritized"], rows[f"{name} sample + update 256, prioritized"] = insert, draw
    return rows


PEERS = {"stable-baselines3": stable_baselines3, "cpprb": cpprb, "flashbax": flashbax}


def main() -> None:
    results: dict[str, dict[str, float]] = {}
    for name in sys.argv[1:] or PEERS:
        try:
            for workload, (shape, dtype, capacity) in {"cartpole": CARTPOLE, "pong": PONG}.items():
                for row, value in PEERS[name](workload, shape, dtype, capacity).items():
                    results.setdefault(row, {})[name] = value.least
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
