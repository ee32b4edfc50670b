"""Other replay buffers on the workloads of `benchmarks/replay.py`. Prints one JSON object: {row: {peer: microseconds}}.

Run by `benchmarks/replay.py` with an interpreter that has them; needs no rlframe. A peer that is not importable is left out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

ENVS, BATCH, GAMMA = 64, 256, 0.99
CARTPOLE = ((4,), np.float32, 100_000)
PONG = ((4, 84, 84), np.uint8, 10_048)


def measure(call: Callable[[], Any], seconds: float = 0.4) -> float:
    """The least microseconds a call takes, over short runs: other work on the machine only ever adds."""
    call()
    start = time.perf_counter()
    call()
    repeats = max(1, int(0.01 / max(1e-7, time.perf_counter() - start)))
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best * 1e6


def data(shape: tuple[int, ...], dtype: Any, count: int = ENVS) -> dict[str, np.ndarray]:
    """A batch of transitions of `count` environments."""
    rng = np.random.default_rng(0)
    make = (
        (lambda: rng.integers(0, 255, (count, *shape)).astype(dtype))
        if dtype == np.uint8
        else (lambda: rng.standard_normal((count, *shape)).astype(dtype))
    )
    return {
        "obs": make(),
        "next_obs": make(),
        "act": rng.integers(0, 2, count).astype(np.int32),
        "rew": rng.standard_normal(count).astype(np.float32),
        "done": rng.random(count) < 0.02,
    }


def stable_baselines3() -> dict[str, float]:
    import gymnasium
    from stable_baselines3.common import buffers

    rows = {}
    for name, (shape, dtype, capacity) in {"cartpole": CARTPOLE, "pong": PONG}.items():
        low, high = (0, 255) if dtype == np.uint8 else (-10, 10)
        spaces = gymnasium.spaces.Box(low, high, shape, dtype), gymnasium.spaces.Discrete(2)
        d = data(shape, dtype)
        infos: list[dict[str, Any]] = [{} for _ in range(ENVS)]

        def fill(buffer: Any) -> Callable[[], None]:
            def add(d: Any = d, infos: Any = infos, buffer: Any = buffer) -> None:
                buffer.add(d["obs"], d["next_obs"], d["act"][:, None], d["rew"], d["done"], infos)

            for _ in range(capacity // ENVS + 10):
                add()
            return add

        buffer = buffers.ReplayBuffer(
            capacity, *spaces, device="cpu", n_envs=ENVS
        )  # its defaults, which tell truncation from termination as ours does
        add = fill(buffer)
        rows[f"{name} insert 64"] = measure(add)
        rows[f"{name} sample 256, 1-step"] = measure(lambda buffer=buffer: buffer.sample(BATCH))
        if name == "cartpole" and hasattr(buffers, "NStepReplayBuffer"):
            buffer = buffers.NStepReplayBuffer(capacity, *spaces, device="cpu", n_envs=ENVS, n_steps=3, gamma=GAMMA)
            fill(buffer)
            rows["cartpole sample 256, 3-step"] = measure(lambda buffer=buffer: buffer.sample(BATCH))
    return rows


def cpprb() -> dict[str, float]:
    import cpprb as library

    rows = {}
    for name, (shape, dtype, capacity) in {"cartpole": CARTPOLE, "pong": PONG}.items():
        fields = {
            "obs": {"shape": shape, "dtype": dtype},
            "next_obs": {"shape": shape, "dtype": dtype},
            "act": {"dtype": np.int32},
            "rew": {"dtype": np.float32},
            "done": {"dtype": bool},
        }
        d = data(shape, dtype)
        buffer = library.ReplayBuffer(capacity, fields)
        for _ in range(capacity // ENVS + 10):
            buffer.add(**d)
        rows[f"{name} insert 64"] = measure(lambda buffer=buffer, d=d: buffer.add(**d))
        rows[f"{name} sample 256, 1-step"] = measure(lambda buffer=buffer: buffer.sample(BATCH))
        if name == "pong":
            continue
        nstep = {"size": 3, "gamma": GAMMA, "rew": "rew", "next": "next_obs"}
        buffer = library.ReplayBuffer(capacity, fields, Nstep=nstep)
        for _ in range(capacity // ENVS):
            buffer.add(**d)
        rows["cartpole sample 256, 3-step"] = measure(lambda buffer=buffer: buffer.sample(BATCH))
        buffer = library.PrioritizedReplayBuffer(capacity, fields, alpha=0.6)
        for _ in range(capacity // ENVS + 10):
            buffer.add(**d)
        rows["cartpole insert 64, prioritised"] = measure(lambda buffer=buffer, d=d: buffer.add(**d))
        priorities = np.random.default_rng(0).random(BATCH)

        def cycle(buffer: Any = buffer, priorities: Any = priorities) -> None:
            buffer.update_priorities(buffer.sample(BATCH, beta=0.4)["indexes"], priorities)

        cycle()
        rows["cartpole sample + update 256, prioritised"] = measure(cycle)
    return rows


def flashbax() -> dict[str, float]:
    import flashbax as fbx
    import jax

    rows = {}
    for name, (shape, dtype, capacity) in {"cartpole": CARTPOLE, "pong": PONG}.items():
        d = {key: value for key, value in data(shape, dtype).items() if key != "next_obs"}
        one = {key: value[0] for key, value in d.items()}

        def fill(buffer: Any) -> tuple[list[Any], Callable[[], None]]:
            add = jax.jit(buffer.add, donate_argnums=0)
            state = [buffer.init(one)]

            def step(d: Any = d) -> None:
                state[0] = jax.block_until_ready(add(state[0], d))

            for _ in range(capacity // ENVS + 10):
                step()
            return state, step

        def draw(buffer: Any, state: list[Any]) -> Callable[[], Any]:
            sample, key = jax.jit(buffer.sample), jax.random.PRNGKey(0)
            return lambda: jax.block_until_ready(sample(state[0], key))

        buffer = fbx.make_flat_buffer(capacity, 256, BATCH, add_batch_size=ENVS)
        state, step = fill(buffer)
        rows[f"{name} insert 64"] = measure(step)
        rows[f"{name} sample 256, 1-step"] = measure(draw(buffer, state))
        if name == "pong":
            continue
        trajectories = fbx.make_trajectory_buffer(ENVS, BATCH, 4, 1, 4, max_size=capacity)
        add = jax.jit(trajectories.add, donate_argnums=0)
        t_state = trajectories.init(one)
        column = {key: value[:, None] for key, value in d.items()}
        for _ in range(capacity // ENVS + 10):
            t_state = add(t_state, column)
        rows["cartpole sample 256, 3-step"] = measure(draw(trajectories, [t_state]))
        prioritised = fbx.make_prioritised_flat_buffer(capacity, 256, BATCH, add_batch_size=ENVS)
        p_state, p_step = fill(prioritised)
        rows["cartpole insert 64, prioritised"] = measure(p_step)
        sample, update = jax.jit(prioritised.sample), jax.jit(prioritised.set_priorities, donate_argnums=0)
        priorities, key = np.random.default_rng(0).random(BATCH).astype(np.float32), jax.random.PRNGKey(0)

        def cycle() -> None:
            indices = sample(p_state[0], key).indices
            p_state[0] = jax.block_until_ready(update(p_state[0], indices, priorities))

        rows["cartpole sample + update 256, prioritised"] = measure(cycle)
    return rows


PEERS = {"stable-baselines3": stable_baselines3, "cpprb": cpprb, "flashbax": flashbax}


def main() -> None:
    results: dict[str, dict[str, float]] = {}
    for name in sys.argv[1:] or PEERS:
        try:
            for row, value in PEERS[name]().items():
                results.setdefault(row, {})[name] = value
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
