"""Time inserts and samples of a replay service in a separate process. Print one JSON object.

python -m benchmarks.ours.replay_service steps --seconds 3
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.ours.reverb import ENVS, LENGTH, SHAPE, STEP_SPEC, WORKLOADS, rate
from benchmarks.processor import Stopwatch
from benchmarks.replay import steps
from rlframe.engines.supervision.node_main import public_methods
from rlframe.handles import Remote
from rlframe.replay.service import ReplayService, ServiceReplayBuffer
from rlframe.transport.sockets import SocketTransport
from rlframe.types import AgentSpecs, ReplaySpec, Sequence, Transition

BATCH = 256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    print(json.dumps(WAYS[args.way](args.seconds)))


@contextlib.contextmanager
def served(agent: AgentSpecs, **options: Any) -> Iterator[ServiceReplayBuffer]:
    """Yield a buffer whose service is in another process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(agent, options, there), daemon=True)
    process.start()
    if not here.poll(120.0):
        raise TimeoutError("The service did not start within 120 s.")
    handle = Remote([here.recv()], "replay service", transport=SocketTransport())
    buffer = ServiceReplayBuffer(agent, [handle])
    try:
        yield buffer
    finally:
        buffer.close()
        here.close()
        process.join(10.0)


def _serve(agent: AgentSpecs, options: dict[str, Any], connection: Any) -> None:
    server = SocketTransport().serve(public_methods(ReplayService(agent, **options)))
    connection.send(server.address)
    with contextlib.suppress(EOFError):  # the parent has exited
        connection.recv()
    server.stop()


def _adder(buffer: ServiceReplayBuffer, envs: int) -> Callable[[], None]:
    buffer.claim_rank(envs)
    ids, made = steps(SHAPE, np.float32, 50, end=0.02)
    made = [_of(step, envs) for step in made]
    for turn in range(len(made)):  # consecutive steps, as from an Actor
        made[turn] = made[turn]._replace(timestep=made[turn - 1].next_timestep)
    turn = 0

    def add() -> None:
        nonlocal turn
        buffer.add(ids[:envs], made[turn % len(made)])
        turn += 1

    return add


def _fill(buffer: ServiceReplayBuffer, count: int) -> None:
    """Add `count` steps and wait until the service has received them."""
    add = _adder(buffer, ENVS)
    for _ in range(count // ENVS):
        add()
    buffer.flush()


def _of(step: Any, envs: int) -> Any:
    import jax

    return jax.tree.map(lambda leaf: leaf[:envs] if isinstance(leaf, np.ndarray) else leaf, step)


def insert_steps(seconds: float) -> dict[str, float]:
    """Insert consecutive steps of one environment. Each is a separate item."""
    agent = AgentSpecs(ReplaySpec("uniform", Transition(1), batch_size=BATCH, capacity=200_000), STEP_SPEC)
    with served(agent) as buffer:
        return rate(_adder(buffer, 1), 1, seconds)


def insert_unrolls(seconds: float) -> dict[str, float]:
    """Insert unrolls of 64 environments, as an Actor does. The oldest items are evicted."""
    spec = ReplaySpec("queue", Sequence(LENGTH), batch_size=ENVS, capacity=100 * ENVS * LENGTH)
    with served(AgentSpecs(spec, STEP_SPEC), waits=False) as buffer:
        add = _adder(buffer, ENVS)
        return rate(lambda: [add() for _ in range(LENGTH)], LENGTH * ENVS, seconds)


def sample_transitions(seconds: float) -> dict[str, float]:
    """Sample batches of 256 transitions with the dataset."""
    spec, _ = WORKLOADS["transitions"]
    with served(AgentSpecs(spec, STEP_SPEC)) as buffer:
        _fill(buffer, spec.capacity)
        with buffer.make_dataset() as dataset:
            return rate(lambda: next(dataset), BATCH, seconds)


def sample_prioritized(seconds: float) -> dict[str, float]:
    """Sample batches of 256 transitions by priority, and update their priorities."""
    spec = ReplaySpec("prioritized", Transition(1), batch_size=BATCH, capacity=20_000, min_size=1_000)
    rng = np.random.default_rng(0)
    with served(AgentSpecs(spec, STEP_SPEC)) as buffer:
        _fill(buffer, spec.capacity)
        with buffer.make_dataset() as dataset:

            def learn() -> None:
                batch = next(dataset)
                buffer.update_priorities(batch.keys, rng.random(BATCH))

            return rate(learn, BATCH, seconds)


def sample_unrolls(seconds: float, items: int = 64_000) -> dict[str, float]:
    """Sample batches of 32 unrolls from a queue of `items` unrolls until it is empty. `seconds` is ignored."""
    del seconds
    spec, _ = WORKLOADS["unrolls"]
    spec = dataclasses.replace(spec, capacity=(items + 2 * ENVS) * LENGTH)
    with served(AgentSpecs(spec, STEP_SPEC)) as buffer:
        _fill(buffer, (items + ENVS) * LENGTH)
        with buffer.make_dataset() as dataset:
            for _ in range(10):
                next(dataset)
            batches, watch = items // (spec.batch_size or 1) - 20, Stopwatch()
            for _ in range(batches):
                next(dataset)
            return watch.rate(batches * (spec.batch_size or 1))


WAYS = {
    "steps": insert_steps,
    "insert unrolls": insert_unrolls,
    "transitions": sample_transitions,
    "prioritized": sample_prioritized,
    "unrolls": sample_unrolls,
}

if __name__ == "__main__":
    main()
