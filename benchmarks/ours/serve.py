"""Serves inference by Courier to clients in other processes, and counts the rows. Prints one JSON object.

python -m benchmarks.ours.serve cnn shared --seconds 5
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import threading
import time
from typing import Any

import numpy as np

CLIENTS, PROCESSES, ROWS = 8, 2, 8  # clients in all; the processes that they share; environments of each
WARM_UP = 1.0  # seconds, after the first answer to everyone
BUCKETS = (8, 16, 32, 64)  # compiled before
SHAPES = {"cnn": ((4, 84, 84), np.uint8), "mlp": ((4,), np.float32)}


def main() -> None:
    """Measures one way to answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=SHAPES)
    parser.add_argument("way", choices=("courier", "shared", "wait", "unbatched", "alone"))
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    measure = _alone if args.way == "alone" else _served
    print(json.dumps(measure(args.workload, args.way, args.seconds)))


def request(workload: str, rows: int) -> tuple[Any, ...]:
    """The arguments of `inference` for so many environments."""
    from rlframe.types import MID, TimeStep

    shape, dtype = SHAPES[workload]
    ones = np.ones(rows, np.float32)
    observation = (np.random.default_rng(0).random((rows, *shape)) * 255).astype(dtype)
    return np.arange(rows), TimeStep(np.full(rows, MID), ones, ones, observation), ()


def _inferencer(workload: str, **config: Any) -> Any:
    from rlframe.agents import PPO, PPOConfig
    from rlframe.inferencers import Inferencer, InferencerConfig
    from rlframe.learners import Learner, LearnerConfig
    from rlframe.types import specs

    shape, dtype = SHAPES[workload]
    observation_spec = specs.BoundedArray(shape, dtype, 0, 255, "observation")
    agent = PPO(PPOConfig(), observation_spec, specs.DiscreteArray(6, np.int32, "action"))
    return Inferencer(InferencerConfig(**config), agent, Learner(LearnerConfig(), agent, None))


def _alone(workload: str, way: str, seconds: float) -> dict[str, float]:
    """The jitted call, numpy to numpy, on one batch of all clients' rows."""
    inferencer, arguments = _inferencer(workload, sync_interval=10**9), request(workload, CLIENTS * ROWS)
    inferencer.inference(*arguments)
    calls, began = 0, time.perf_counter()
    while time.perf_counter() < began + seconds:
        inferencer.inference(*arguments)
        calls += 1
    return {"rows_per_second": calls * CLIENTS * ROWS / (time.perf_counter() - began)}


def _served(workload: str, way: str, seconds: float) -> dict[str, float]:
    import portpicker
    from launchpad.nodes.courier import courier_utils

    # Unbatched: no call takes in more than one request.
    config = {"courier": {}, "shared": {}, "wait": {"max_wait": 0.001}, "unbatched": {"max_batch": ROWS}}[way]
    inferencer, port = _inferencer(workload, **config), portpicker.pick_unused_port()
    for rows in BUCKETS:
        inferencer.inference(*request(workload, rows))
    server = courier_utils.make_courier_server(inferencer, port=port)
    server.Start()
    runner = threading.Thread(target=inferencer.run)
    runner.start()
    context = multiprocessing.get_context("spawn")
    answered, ready, stop = context.Value("q", 0), context.Semaphore(0), context.Event()
    arguments = (f"localhost:{port}", workload, way == "shared", answered, ready, stop)
    clients = [context.Process(target=_clients, args=arguments, daemon=True) for _ in range(PROCESSES)]
    for client in clients:
        client.start()
    for _ in range(CLIENTS):
        if not ready.acquire(timeout=120.0):
            raise TimeoutError("A client got no answer within 120 s.")
    time.sleep(WARM_UP)
    before, counts, began = answered.value, inferencer.stats(), time.perf_counter()
    time.sleep(seconds)
    rows, took, after = answered.value - before, time.perf_counter() - began, inferencer.stats()
    stop.set()
    for client in clients:
        client.join(timeout=30.0)
    inferencer.stop()
    runner.join()
    server.Stop()
    server.Join()
    calls = after["calls"] - counts["calls"]
    return {"rows_per_second": rows / took, "rows_per_call": rows / max(calls, 1)}


def _clients(address: str, workload: str, shared: bool, answered: Any, ready: Any, stop: Any) -> None:
    """So many clients as threads, each with one call under way."""
    import courier

    from rlframe.handles import connect, resolve
    from rlframe.inferencers.shared_calls import InferencerClient

    def work() -> None:
        remote = resolve(courier.Client(address), "inferencer", connect=InferencerClient if shared else connect)
        arguments = request(workload, ROWS)
        remote.inference(*arguments)
        ready.release()
        while not stop.is_set():
            remote.inference(*arguments)
            with answered.get_lock():
                answered.value += ROWS

    threads = [threading.Thread(target=work) for _ in range(CLIENTS // PROCESSES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
