"""One measurement of a Coordinator: `python -m benchmarks.ours.coordinator [--workers N] [--answer-after S]`.

The Coordinator with its threads and its journal is real. The workers are scripted, run in this process, and respond
after `--answer-after` seconds. Prints messages per second, and the 50th and 99th percentile of the milliseconds from a
response to the next call of the same worker.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import queue
import tempfile
import threading
import time
from typing import Any

import numpy as np

from benchmarks.processor import Stopwatch
from rlframe.coordinator import Coordinator, CoordinatorConfig
from rlframe.coordinator.commander import TrainOne
from rlframe.coordinator.messages import (
    Alive,
    BatchMeta,
    Closed,
    Collected,
    Demand,
    Header,
    Learned,
    Resources,
    Started,
    Update,
    WorkerInfo,
    WorkerKey,
    WorkerReply,
)


class Workers:
    """All workers and the connections to them. One thread sends the responses that are due."""

    def __init__(self, response_delay: float) -> None:
        self._response_delay = response_delay
        self._due: list[tuple[float, int, Any]] = []
        self._order = itertools.count()
        self._lock = threading.Condition()
        self._responded_at: dict[str, float] = {}
        self._tasks: dict[str, tuple[str, int]] = {}
        self._steps: dict[str, int] = {}
        self._is_closed = False
        self.version = self.learned = 0
        self.num_responses = 0
        self.waits: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        with self._lock:
            self._is_closed = True
            self._lock.notify()
        self._thread.join(5.0)

    # --- methods of a transport

    def connect(self, address: str) -> WorkerConnection:
        """Return a connection to the worker with this id."""
        return WorkerConnection(self, address)

    def call(self, worker_id: str, method: str, args: tuple[Any, ...], response: queue.SimpleQueue) -> None:
        """Schedule the response to a call."""
        now = time.perf_counter()
        responded_at = self._responded_at.pop(worker_id, None) if method == "get_data" else None
        if responded_at is not None:
            self.waits.append(now - responded_at)
        delay = self._response_delay if method == "get_data" else 0.0
        with self._lock:
            heapq.heappush(self._due, (now + delay, next(self._order), (worker_id, method, args, response)))
            self._lock.notify()

    def _run(self) -> None:
        while not self._is_closed:
            with self._lock:
                wait = self._due[0][0] - time.perf_counter() if self._due else 1.0
                if wait > 0:
                    self._lock.wait(wait)
                    continue
                _, _, (worker_id, method, args, response) = heapq.heappop(self._due)
            reply = self._reply(worker_id, method, *args)
            self.num_responses += 1
            if method == "get_data":
                self._responded_at[worker_id] = time.perf_counter()
            response.put(reply)

    def _reply(self, worker_id: str, method: str, header: Header | None = None, request: Any = None) -> WorkerReply:
        if header is None:
            task = self._tasks.get(worker_id)
            if method == "resources":
                return Resources("here", 1)
            return Alive(worker_id, 0, "running" if task else "idle", *(task or (None, -1)))
        if method == "start_task":
            self._tasks[worker_id] = (header.task_id, header.attempt)
            return Started({"params_version": self.version, "learner_steps": self.learned})
        if method == "data_demand":
            return Demand(8)
        if method == "learn":
            self.version += 1
            self.learned += request.count
            return Learned(self.version, self.learned, tuple(Update(batch.keys) for batch in request.batches))
        if method == "close_task":
            return Closed()
        steps = self._steps[worker_id] = self._steps.get(worker_id, 0) + 16
        index = float(worker_id.partition("/")[2])
        counts = {"env_steps": steps, "episodes": steps // 64, "return_sum": float(steps), "length_sum": steps}
        return Collected({**counts, "rank": index, "incarnation": 0.0}, self.version)


class WorkerConnection:
    """A connection to one worker: a client of the transport."""

    def __init__(self, workers: Workers, worker_id: str) -> None:
        self._workers, self._worker_id = workers, worker_id

    def call(self, method: str, /, *args: Any) -> WorkerReply:
        """Call a method and wait for the response."""
        response: queue.SimpleQueue[WorkerReply] = queue.SimpleQueue()
        self._workers.call(self._worker_id, method, args, response)
        return response.get()


class Operator:
    """An operator whose workers all exist from the start."""

    every, grace = 0.25, 0.0

    def __init__(self, workers: Workers, count: int) -> None:
        self.transport: Any = workers
        collectors = [WorkerInfo("collector", index, 0, f"collector/{index}") for index in range(count - 1)]
        self._infos = [WorkerInfo("learner", 0, 0, "learner/0"), *collectors]

    def list_workers(self) -> list[WorkerInfo]:
        """Return all workers."""
        return self._infos

    def scale(self, role: str, n: int) -> None:
        """Remove the workers of a role for n = 0. Otherwise do nothing."""
        if n == 0:
            self._infos = [info for info in self._infos if info.role != role]

    def replace(self, key: WorkerKey) -> None:
        """Do nothing."""

    def release(self, key: WorkerKey) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Replay:
    """A replay that returns keys immediately."""

    fetches_by_key = True
    is_saved_by_learner = False

    def __init__(self) -> None:
        self._keys = np.zeros((256, 3), np.int64)
        self._probabilities = np.ones(256)

    def draw(self, timeout: float = 0.0) -> BatchMeta:
        """Return a batch of 256."""
        return BatchMeta(self._keys, self._probabilities)

    def release(self, keys: np.ndarray) -> None:
        """Do nothing."""

    def note_update(self, keys: np.ndarray, version: int) -> None:
        """Do nothing."""

    def stats(self) -> dict[str, int]:
        """Return constant counters."""
        return {"items": 0}


def main() -> None:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--answer-after", type=float, default=0.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        workers, collectors = Workers(args.answer_after), args.workers - 1
        cfg = CoordinatorConfig(path, max_collectors=collectors, collectors=collectors)
        operator = Operator(workers, args.workers)
        coordinator = Coordinator(TrainOne(env_steps=10**12), operator, Replay(), None, cfg)
        coordinator._job.requests.count_is_manual = True  # the number of collectors is fixed
        threading.Thread(target=coordinator.run, daemon=True).start()
        deadline = time.monotonic() + 60.0
        while len(workers._steps) < collectors:
            assert time.monotonic() < deadline, f"Only {len(workers._steps)} of {collectors} collectors work."
            time.sleep(0.05)
        time.sleep(min(1.0, args.seconds / 4))
        before, watch = workers.num_responses, Stopwatch()
        workers.waits.clear()
        time.sleep(args.seconds)
        measured = watch.rate(workers.num_responses - before)
        median, worst = np.percentile(np.array(workers.waits) * 1e3, [50, 99])
        coordinator.close()
    measured["messages_per_second"] = measured.pop("steps_per_second")
    print(json.dumps({**measured, "median_ms": median, "worst_ms": worst}))


if __name__ == "__main__":
    main()
