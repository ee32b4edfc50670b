"""Times a Reverb server in a process of its own: what goes in, and what comes out. Prints one JSON object.

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

SHAPE, ENVS, LENGTH, GAMMA = (4,), 64, 20, 0.99  # CartPole's observation; of an actor; steps of an unroll
STEP_SPEC = StepSpec(specs.Array(SHAPE, np.float32), specs.DiscreteArray(2, dtype=np.int32), {}, ())
WARM_UP = 0.5  # seconds

# DQN's transitions (two steps of Reverb's); IMPALA's unrolls, each by itself, and as `distributed` holds them: those of
# a pool as one. (spec, unrolls of an item).
_UNROLLS = ReplaySpec("queue", Sequence(LENGTH), batch_size=32, capacity=LENGTH * 32)
WORKLOADS = {
    "transitions": (ReplaySpec("uniform", Transition(1, GAMMA), batch_size=256, capacity=20_000, min_size=1_000), 1),
    "unrolls": (_UNROLLS, 1),
    "blocks": (_UNROLLS, 16),
}


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("insert")
    command.add_argument("way", choices=INSERTS)
    command.add_argument("--seconds", type=float, default=3.0)
    command = commands.add_parser("sample")
    command.add_argument("workload", choices=WORKLOADS)
    command.add_argument("--seconds", type=float, default=3.0, help="for transitions")
    command.add_argument("--items", type=int, default=64_000, help="unrolls that are drawn")
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
    """Serves what the picklable `tables()` gives in another process; gives its address."""
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
    with contextlib.suppress(EOFError):  # its parent has ended
        connection.recv()


def bare_table() -> list[Any]:
    """A table of anybody's items, without a limit."""
    reverb, _ = import_reverb()
    return [
        reverb.Table(REPLAY, reverb.selectors.Uniform(), reverb.selectors.Fifo(), 1000, reverb.rate_limiters.MinSize(1))
    ]


def rate(call: Callable[[], Any], counts: int, seconds: float, warm_up: float = WARM_UP) -> dict[str, float]:
    """Counts per second, and processor time for each; `call` counts for `counts`."""
    until = time.perf_counter() + warm_up
    while time.perf_counter() < until:
        call()
    calls, watch = 0, Stopwatch()
    while watch.seconds < seconds:
        call()
        calls += 1
    return watch.rate(calls * counts)


# Inserting


def insert_ours(seconds: float) -> dict[str, float]:
    """Unrolls of 64 environments through the buffer, as an Actor adds them."""
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
    """The same arrays by Reverb's own writer alone, each an append and an item that is waited for."""
    agent = AgentSpecs(ReplaySpec("queue", Sequence(LENGTH), batch_size=ENVS, capacity=ENVS * LENGTH), STEP_SPEC)
    block = np.random.default_rng(0).integers(0, 256, (ENVS, ItemRows(agent).nbytes), np.uint8)  # is not compressed
    with _bare_writer(num_keep_alive_refs=1) as writer:

        def insert() -> None:
            writer.append({"rows": block})
            writer.create_item(REPLAY, 1.0, {"rows": writer.history["rows"][-1:]})
            writer.flush()

        return rate(insert, LENGTH * ENVS, seconds)


def insert_appends(seconds: float, length: int = LENGTH, period: int = LENGTH) -> dict[str, float]:
    """Reverb's published way: an environment's steps appended one by one, and an item of the last `length` of them."""
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
                writer.flush(block_until_num_items=40)  # from 50 on their way Reverb warns

        return rate(append, 1, seconds)


def insert_transitions(seconds: float) -> dict[str, float]:
    """The same with an item of two steps for each append, as DQN's adders insert."""
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
    """Adds a step of each environment."""
    ids, cycle = steps(SHAPE, np.float32, 50, end=0.02)
    ids, t = ids[:envs], 0

    def add() -> None:
        nonlocal t
        buffer.add(ids, cycle[t])
        t = (t + 1) % len(cycle)

    return add


# Sampling


def sample_transitions(seconds: float) -> dict[str, float]:
    """Items per second of a replay that nobody writes to."""
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
    """Unrolls per second of a queue that was filled before."""
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
    """{way: items per second}, and our processor time for an item."""
    rates = {way: rate["steps_per_second"] for way, rate in found.items()}
    return {**rates, "processor_us": found["ours"]["processor_us"]}


def _dataset(buffer: Any) -> tuple[Callable[[], Any], Callable[[], None]]:
    """(gives a batch, ends it): as a Learner reads it."""
    dataset = buffer.make_dataset()
    return lambda: next(dataset), dataset.close


def _bare_sampler(address: str, draws: int) -> tuple[Callable[[], np.ndarray], Callable[[], None]]:
    """The same by Reverb's sampler below `reverb.Client`, which drops all but the rows, and makes no fields of them.

    It asks for as many ahead as rlframe does: what is ahead of a queue gets older.
    """
    sampler = import_reverb()[0].pybind.Client(address).NewSampler(REPLAY, -1, draws + 1)

    def draw() -> np.ndarray:
        drawn = [sampler.GetNextTrajectory() for _ in range(draws)]
        return np.concatenate([rows for _, _, _, _, rows in drawn])

    return draw, sampler.Close


if __name__ == "__main__":
    main()
