"""Serve inference to clients in other processes, and count the rows. Print one JSON object.

The same processes measure all ways in alternating turns, because the speed of a machine drifts. The ways are the jitted
call alone, the service with remote clients, and the service with client threads in the same process.

python -m benchmarks.ours.serve cnn --seconds 5
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import threading
import time
from typing import Any

import numpy as np

from benchmarks.processor import Stopwatch
from rlframe import extras
from rlframe.engines.supervision.node_main import public_methods
from rlframe.transport import DEFAULT
from rlframe.transport.sockets import SocketTransport

CLIENTS, PROCESSES, ROWS = 8, 2, 8  # number of clients; processes of the clients; environments per client
TURNS, SETTLING = 5, 0.3  # turns of each way; seconds of a turn before the measurement starts
BUCKETS = (8, 16, 24, 32, 48, 64)  # batch sizes to compile before the measurement
SHAPES = {"cnn": ((4, 84, 84), np.uint8), "mlp": ((4,), np.float32)}
# way -> options of the service. With `unbatched`, each call handles one request.
SERVICES: dict[str, dict[str, Any]] = {
    "sockets": {},
    "shared": {},
    "courier": {},
    "unbatched": {"max_batch": ROWS},
    "wait": {"max_wait": 0.001},
}
ALONE, TOGETHER, PAUSE, STOP = "alone", "together", -1, -2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=SHAPES)
    parser.add_argument("--seconds", type=float, default=5.0, help="total seconds for each way")
    args = parser.parse_args()
    print(json.dumps(measure(args.workload, args.seconds)))


def request(workload: str, rows: int) -> tuple[Any, ...]:
    """Return the arguments of `inference` for `rows` environments."""
    from rlframe.types import MID, TimeStep

    shape, dtype = SHAPES[workload]
    ones = np.ones(rows, np.float32)
    observation = (np.random.default_rng(0).random((rows, *shape)) * 255).astype(dtype)
    return np.arange(rows), TimeStep(np.full(rows, MID), ones, ones, observation), ()


def measure(workload: str, seconds: float) -> dict[str, dict[str, float]]:
    """Measure all ways.

    Returns:
        {way: {"rows_per_second", "rows_per_call", "processor_us"}}, medians over the turns. `processor_us` is the
        processor time per row, including the clients.
    """
    names = [way for way in SERVICES if way != "courier" or extras.is_installed("launchpad")]
    plain = Service(workload, {})
    services = {way: Service(workload, config) if (config := SERVICES[way]) else plain for way in names}
    alone, arguments = inferencer(workload, sync_interval=10**9), request(workload, CLIENTS * ROWS)
    servers = {way: transport_of(way).serve(public_methods(one.inferencer)) for way, one in services.items()}
    context = multiprocessing.get_context("spawn")
    rows_served, ready, phase = context.Value("q", 0), context.Semaphore(0), context.Value("q", PAUSE)
    addresses = {way: server.address for way, server in servers.items()}
    clients = [
        context.Process(target=_run_clients, args=(addresses, workload, rows_served, ready, phase), daemon=True)
        for _ in range(PROCESSES)
    ]
    for client in clients:
        client.start()
    for _ in range(CLIENTS):
        if not ready.acquire(timeout=120.0):
            raise TimeoutError("A client got no response within 120 s.")

    def turn_of(way: str) -> dict[str, float]:
        if way == ALONE:
            calls, watch = 0, Stopwatch()
            while watch.seconds < seconds / TURNS:
                alone.inference(*arguments)
                calls += 1
            rate = watch.rate(rows := calls * CLIENTS * ROWS)
        elif way == TOGETHER:
            calls, watch = plain.calls, Stopwatch()
            rows = _rows_from_threads(plain, workload, watch, seconds / TURNS)
            calls, rate = plain.calls - calls, watch.rate(rows)
        else:
            phase.value = names.index(way)
            time.sleep(SETTLING)
            before, calls, watch = rows_served.value, services[way].calls, Stopwatch()
            time.sleep(seconds / TURNS)
            rows, calls = rows_served.value - before, services[way].calls - calls
            rate = watch.rate(rows)
            phase.value = PAUSE
            for _ in range(CLIENTS):
                ready.acquire(timeout=30.0)
        per_call = rows / max(calls, 1)
        return {
            "rows_per_second": rate["steps_per_second"],
            "rows_per_call": per_call,
            "processor_us": rate["processor_us"],
        }

    ways = [ALONE, TOGETHER, *names]
    turns = [{way: turn_of(way) for way in ways} for _ in range(TURNS)]
    phase.value = STOP
    for client in clients:
        client.join(timeout=30.0)
    for one in set(services.values()):
        one.stop()
    for server in servers.values():
        server.stop()
    return {way: {name: statistics.median(t[way][name] for t in turns) for name in turns[0][way]} for way in ways}


def inferencer(workload: str, **config: Any) -> Any:
    """Return PPO's inferencer with initial parameters, compiled for all batch sizes that occur."""
    from rlframe.agents import PPO, PPOConfig
    from rlframe.inferencers import Inferencer, InferencerConfig
    from rlframe.learners import Learner, LearnerConfig
    from rlframe.types import specs

    shape, dtype = SHAPES[workload]
    observation_spec = specs.BoundedArray(shape, dtype, 0, 255, "observation")
    agent = PPO(PPOConfig(), observation_spec, specs.DiscreteArray(6, np.int32, "action"))
    result = Inferencer(InferencerConfig(**config), agent, Learner(LearnerConfig(), agent, None))
    for rows in BUCKETS:
        result.inference(*request(workload, rows))
    return result


class Service:
    """A running inferencer."""

    def __init__(self, workload: str, config: dict[str, Any]) -> None:
        self.inferencer = inferencer(workload, **config)
        # daemon, so that it does not keep the process alive after an error
        self._runner = threading.Thread(target=self.inferencer.run, daemon=True)
        self._runner.start()

    @property
    def calls(self) -> int:
        return self.inferencer.stats()["calls"]

    def stop(self) -> None:
        self.inferencer.stop()
        self._runner.join()


def transport_of(way: str) -> Any:
    """Return the transport of the clients."""
    return DEFAULT if way == "courier" else SocketTransport()


def _rows_from_threads(service: Service, workload: str, watch: Stopwatch, seconds: float) -> int:
    """Return the number of rows served to client threads in this process, without remote calls."""
    rows_served = [0] * CLIENTS

    def work(client: int) -> None:
        arguments = request(workload, ROWS)
        while watch.seconds < seconds:
            service.inferencer.inference(*arguments)
            rows_served[client] += ROWS

    threads = [threading.Thread(target=work, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rows_served)


def _run_clients(addresses: dict[str, str], workload: str, rows_served: Any, ready: Any, phase: Any) -> None:
    """Run the clients of one process as threads, each with one pending call."""
    from rlframe.handles import Remote
    from rlframe.inferencers.shared_calls import RemoteInferencer

    def work() -> None:
        remotes = [
            (RemoteInferencer if way == "shared" else Remote)([at], "inferencer", transport=transport_of(way))
            for way, at in addresses.items()
        ]
        arguments = request(workload, ROWS)
        for remote in remotes:
            remote.inference(*arguments)
        ready.release()
        while phase.value != STOP:
            paused = True
            while (way := phase.value) >= 0:
                paused = False
                remotes[way].inference(*arguments)
                with rows_served.get_lock():
                    rows_served.value += ROWS
            if not paused:
                ready.release()
            time.sleep(0.01)

    threads = [threading.Thread(target=work) for _ in range(CLIENTS // PROCESSES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
