"""Time inserts and samples of a Reverb server in a separate process. Print one JSON object.

python -m benchmarks.ours.reverb insert ours --seconds 3
python -m benchmarks.ours.reverb sample transitions --seconds 3
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.processor import Stopwatch
from benchmarks.replay import steps
from rlframe.replay.reverb import ReverbReplayBuffer
from rlframe.replay.reverb.connection import import_reverb
from rlframe.replay.reverb.item_bytes import ItemRows
from rlframe.replay.reverb.server_tables import REPLAY
from rlframe.types import AgentSpecs, ReplaySpec, Sequence, StepSpec, Transition, specs

# CartPole's observation; environments of an actor; steps of an unroll; discount
SHAPE, ENVS, LENGTH, GAMMA = (4,), 64, 20, 0.99
STEP_SPEC = StepSpec(specs.Array(SHAPE, np.float32), specs.DiscreteArray(2, dtype=np.int32), {}, ())
WARM_UP = 0.5  # seconds

# DQN's transitions (two Reverb steps each); IMPALA's unrolls as single items, and in blocks with all unrolls of a pool,
# as in `distributed`. Values: (spec, unrolls per item).
_UNROLLS = ReplaySpec("queue", Sequence(LENGTH), batch_size=32, capacity=LENGTH * 32)
WORKLOADS = {
    "transitions": (ReplaySpec("uniform", Transition(1, GAMMA), batch_size=256, capacity=20_000, min_size=1_000), 1),
    "unrolls": (_UNROLLS, 1),
    "blocks": (_UNROLLS, 16),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("insert")
    command.add_argument("way", choices=INSERTS)
    command.add_argument("--seconds", type=float, default=3.0)
    command = commands.add_parser("sample")
    command.add_argument("workload", choices=WORKLOADS)
    command.add_argument("--seconds", type=float, default=3.0, help="duration for transitions")
    command.add_argument("--items", type=int, default=64_000, help="number of unrolls to sample")
    args = parser.parse_args()
    if args.command == "insert":
        result = INSERTS[args.way](args.seconds)
    elif args.workload == "transitions":
        result = sample_transitions(args.seconds)
    else:
        result = sample_unrolls(args.workload, args.items)
    print(json.dumps(result))


@contextlib.contextmanager
def server(tables: Any) -> Iterator[str]:
    """Serve the tables from the picklable function `tables` in another process. Yield the address."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as checkpoints:
        process = context.Process(target=_serve, args=(tables, checkpoints, there), daemon=True)
        process.start()
        try:
            if not here.poll(120.0):
                raise TimeoutError("The Reverb server did not start within 120 s.")
            yield f"localhost:{here.recv()}"
        finally:
            process.kill()
            process.join()


def _serve(tables: Callable[[], list[Any]], checkpoints: str, connection: Any) -> None:
    reverb, _ = import_reverb()
    served = reverb.Server(tables(), port=None, checkpointer=reverb.checkpointers.DefaultCheckpointer(checkpoints))
    connection.send(served.port)
    with contextlib.suppress(EOFError):  # the parent has exited
        connection.recv()


def bare_table() -> list[Any]:
    """Return a table for any items, without a rate limit."""
    reverb, _ = import_reverb()
    return [
        reverb.Table(REPLAY, reverb.selectors.Uniform(), reverb.selectors.Fifo(), 1000, reverb.rate_limiters.MinSize(1))
    ]


def rate(call: Callable[[], Any], counts: int, seconds: float, warm_up: float = WARM_UP) -> dict[str, float]:
    """Return counts per second and processor time per count. One call of `call` is `counts` counts."""
    until = time.perf_counter() + warm_up
    while time.perf_counter() < until:
        call()
    calls, watch = 0, Stopwatch()
    while watch.seconds < seconds:
        call()
        calls += 1
    return watch.rate(calls * counts)


# --- inserting


def insert_ours(seconds: float) -> dict[str, float]:
    """Insert unrolls of 64 environments through the buffer, as an Actor does."""
    agent = AgentSpecs(ReplaySpec("queue", Sequence(LENGTH), batch_size=ENVS, capacity=100 * ENVS * LENGTH), STEP_SPEC)
    with server(ReverbReplayBuffer.tables(agent, block=ENVS, when_full="drop")) as address:
        buffer = ReverbReplayBuffer(agent, address)
        buffer.claim_rank(ENVS)
        add = _adder(buffer)
        try:
            return rate(lambda: [add() for _ in range(LENGTH)], LENGTH * ENVS, seconds)
        finally:
            buffer.close()


def insert_blocks(seconds: float) -> dict[str, float]:
    """Insert the same arrays with Reverb's own writer: one append and one item at a time, waiting for each."""
    agent = AgentSpecs(ReplaySpec("queue", Sequence(LENGTH), batch_size=ENVS, capacity=ENVS * LENGTH), STEP_SPEC)
    # random bytes, so that compression has no effect
    block = np.random.default_rng(0).integers(0, 256, (ENVS, ItemRows(agent).nbytes), np.uint8)
    with _bare_writer(num_keep_alive_refs=1) as writer:

        def insert() -> None:
            writer.append({"rows": block})
            writer.create_item(REPLAY, 1.0, {"rows": writer.history["rows"][-1:]})
            writer.flush()

        return rate(insert, LENGTH * ENVS, seconds)


def insert_appends(seconds: float, length: int = LENGTH, period: int = LENGTH) -> dict[str, float]:
    """Insert as documented by Reverb: append single steps of an environment, and items of the last `length` steps."""
    step = {
        "observation": np.zeros(SHAPE, np.float32),
        "action": np.int32(0),
        "reward": np.float32(1.0),
        "discount": np.float32(1.0),
        "step_type": np.uint8(1),
    }
    taken = 0
    with _bare_writer(num_keep_alive_refs=length) as writer:

        def append() -> None:
            nonlocal taken
            writer.append(step)
            taken += 1
            if taken >= length and taken % period == 0:
                item = {name: column[-length:] for name, column in writer.history.items()}
                writer.create_item(REPLAY, 1.0, item)
                writer.flush(block_until_num_items=40)  # Reverb warns from 50 pending items on

        return rate(append, 1, seconds)


def insert_transitions(seconds: float) -> dict[str, float]:
    """Insert in the same way, with an item of two steps per append, like DQN's adders."""
    return insert_appends(seconds, length=2, period=1)


INSERTS = {
    "ours": insert_ours,
    "blocks": insert_blocks,
    "appends": insert_appends,
    "transitions": insert_transitions,
}


@contextlib.contextmanager
def _bare_writer(num_keep_alive_refs: int) -> Iterator[Any]:
    reverb, _ = import_reverb()
    with server(bare_table) as address, reverb.Client(address).trajectory_writer(num_keep_alive_refs) as writer:
        yield writer


def _adder(buffer: Any, envs: int = ENVS) -> Callable[[], None]:
    """Return a function that adds one step of each environment."""
    ids, cycle = steps(SHAPE, np.float32, 50, end=0.02)
    ids, t = ids[:envs], 0

    def add() -> None:
        nonlocal t
        buffer.add(ids, cycle[t])
        t = (t + 1) % len(cycle)

    return add


# --- sampling


def sample_transitions(seconds: float) -> dict[str, float]:
    """Return items per second from a replay without writers."""
    spec, _ = WORKLOADS["transitions"]
    agent = AgentSpecs(spec, STEP_SPEC)
    with server(ReverbReplayBuffer.tables(agent)) as address:
        buffer = ReverbReplayBuffer(agent, address)
        buffer.claim_rank(ENVS)
        add = _adder(buffer)
        while buffer.size < spec.min_size * 4:
            add()
        found = {}
        for way in ("ours", "bare"):
            draw, close = _dataset(buffer) if way == "ours" else _bare_sampler(address, spec.batch_size)
            found[way] = rate(draw, spec.batch_size, seconds)
            close()
        buffer.close()
    return _both(found)


def sample_unrolls(workload: str, items: int) -> dict[str, float]:
    """Return unrolls per second from a filled queue."""
    spec, block = WORKLOADS[workload]
    agent = AgentSpecs(spec, STEP_SPEC)
    found = {}
    for way in ("ours", "bare"):
        with server(ReverbReplayBuffer.tables(agent, block=block, capacity=(items + ENVS) * LENGTH)) as address:
            buffer = ReverbReplayBuffer(agent, address)
            buffer.claim_rank(ENVS)
            add = _adder(buffer)
            for _ in range(LENGTH * items // ENVS):
                add()
            draw, close = _dataset(buffer) if way == "ours" else _bare_sampler(address, spec.batch_size // block)
            for _ in range(10):
                draw()
            batches, watch = items // spec.batch_size - 20, Stopwatch()
            for _ in range(batches):
                draw()
            found[way] = watch.rate(batches * spec.batch_size)
            close()
            buffer.close()
    return _both(found)


def _both(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return {way: items per second}, and our processor time per item."""
    rates = {way: rate["steps_per_second"] for way, rate in found.items()}
    return {**rates, "processor_us": found["ours"]["processor_us"]}


def _dataset(buffer: Any) -> tuple[Callable[[], Any], Callable[[], None]]:
    """Return (function that returns a batch as for a Learner, function that ends the dataset)."""
    dataset = buffer.make_dataset()
    return lambda: next(dataset), dataset.close


def _bare_sampler(address: str, num_items: int) -> tuple[Callable[[], np.ndarray], Callable[[], None]]:
    """Return the same two functions for Reverb's own sampler, below `reverb.Client`.

    It discards everything except the rows, and builds no fields from them. It requests as many items ahead as rlframe
    does, because items that are fetched ahead from a queue become older.
    """
    sampler = import_reverb()[0].pybind.Client(address).NewSampler(REPLAY, -1, num_items + 1)

    def draw() -> np.ndarray:
        drawn = [sampler.GetNextTrajectory() for _ in range(num_items)]
        return np.concatenate([rows for _, _, _, _, rows in drawn])

    return draw, sampler.Close


if __name__ == "__main__":
    main()
