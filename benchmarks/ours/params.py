"""Time the transfer of new parameters from a learner's process to this process. Print one JSON object.

python -m benchmarks.ours.params shared --reads 200
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.processor import Stopwatch
from rlframe.engines.supervision.node_main import public_methods
from rlframe.transport import DEFAULT
from rlframe.transport.sockets import SocketTransport

HIDDEN = (1024, 1016)  # layer sizes of an MLP with 4 inputs and 4 MiB of parameters


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=("shared", "sockets", "courier"))
    parser.add_argument("--reads", type=int, default=200)
    args = parser.parse_args()
    print(json.dumps(_measure(args.way, args.reads)))


def _measure(way: str, reads: int) -> dict[str, float]:
    """Return the median microseconds from the request for a newer version to its tree.

    `processor_us` is the processor time of both processes per version, including the update that creates it.
    """
    from rlframe.handles import Remote
    from rlframe.params.reader import ParamReader

    transport = transport_of(way)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_learn, args=(way, there), daemon=True)
    process.start()
    if not here.poll(120.0):
        raise TimeoutError("The learner did not start within 120 s.")
    learner: Any = Remote([here.recv()], "learner", transport=transport)
    learner = ParamReader(learner) if way == "shared" else learner
    version, durations, watch = learner.get_params()[0], [], Stopwatch()
    for _ in range(reads):
        here.send("learn")
        here.recv()
        began = time.perf_counter()
        newer, params = learner.get_params(version)
        durations.append(time.perf_counter() - began)
        assert newer > version and params is not None
        version = newer
    processor_us = watch.processor_us(reads)
    here.send("end")
    process.join(timeout=30.0)
    return {"microseconds": 1e6 * statistics.median(durations), "processor_us": processor_us}


def transport_of(way: str) -> Any:
    """Return the transport for calls to the learner."""
    return DEFAULT if way == "courier" else SocketTransport()


def _learn(way: str, connection: Any) -> None:
    from rlframe.agents import DQN, DQNConfig
    from rlframe.agents.networks import MLPConfig
    from rlframe.learners import Learner, LearnerConfig
    from rlframe.types import Batch, TransitionBatch, specs

    observation_spec = specs.Array((4,), np.float32, "observation")
    agent = DQN(DQNConfig(), observation_spec, specs.DiscreteArray(2, np.int32, "action"), MLPConfig(HIDDEN))
    learner = Learner(LearnerConfig(), agent, None)
    one, observation = np.ones(1, np.float32), np.ones((1, 4), np.float32)
    data = TransitionBatch(observation, np.zeros(1, np.int32), one, one, observation, {})
    batch = Batch(data, np.zeros((1, 3), np.int64), one, np.ones(1, np.int64))
    server = transport_of(way).serve(public_methods(learner))
    learner.step(batch)
    connection.send(server.address)
    while connection.recv() == "learn":
        float(learner.step(batch)["loss"])  # waits for the update
        connection.send("learned")
    server.stop()
    learner.close()


if __name__ == "__main__":
    main()
