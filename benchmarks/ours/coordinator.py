"""One measurement of a Coordinator: `python -m benchmarks.ours.coordinator [--workers N] [--answer-after S]`.

The Coordinator with its threads and its journal is real; the workers are scripted, in this process, and answer after
`--answer-after` seconds. Prints messages handled per second, and from an answer to its worker's next call:
the 50th and 99th percentile, in milliseconds.
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
    """All of them, and the connections to them: one thread gives the answers that are due."""

    def __init__(self, answer_after: float) -> None:
        self._answer_after = answer_after
        self._due: list[tuple[float, int, Any]] = []
        self._order = itertools.count()
        self._lock = threading.Condition()
        self._answered_at: dict[str, float] = {}
        self._tasks: dict[str, tuple[str, int]] = {}
        self._steps: dict[str, int] = {}
        self._ends = False
        self.version = self.learned = 0
        self.answers = 0
        self.waits: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        with self._lock:
            self._ends = True
            self._lock.notify()
        self._thread.join(5.0)

    # --- as a transport

    def connect(self, address: str) -> Connection:
        """To the worker of this name."""
        return Connection(self, address)

    def call(self, worker_id: str, method: str, args: tuple[Any, ...], answer: queue.SimpleQueue) -> None:
        """Takes a call, which is answered in a while."""
        now = time.perf_counter()
        answered_at = self._answered_at.pop(worker_id, None) if method == "get_data" else None
        if answered_at is not None:
            self.waits.append(now - answered_at)
        after = self._answer_after if method == "get_data" else 0.0
        with self._lock:
            heapq.heappush(self._due, (now + after, next(self._order), (worker_id, method, args, answer)))
            self._lock.notify()

    def _run(self) -> None:
        while not self._ends:
            with self._lock:
                wait = self._due[0][0] - time.perf_counter() if self._due else 1.0
                if wait > 0:
                    self._lock.wait(wait)
                    continue
                _, _, (worker_id, method, args, answer) = heapq.heappop(self._due)
            reply = self._reply(worker_id, method, *args)
            self.answers += 1
            if method == "get_data":
                self._answered_at[worker_id] = time.perf_counter()
            answer.put(reply)

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


class Connection:
    """To one worker: a client of the transport."""

    def __init__(self, workers: Workers, worker_id: str) -> None:
        self._workers, self._worker_id = workers, worker_id

    def call(self, method: str, /, *args: Any) -> WorkerReply:
        """Calls it, and waits for the answer."""
        answer: queue.SimpleQueue[WorkerReply] = queue.SimpleQueue()
        self._workers.call(self._worker_id, method, args, answer)
        return answer.get()


class Operator:
    """Has all workers from the start."""

    every, grace = 0.25, 0.0

    def __init__(self, workers: Workers, count: int) -> None:
        self.transport: Any = workers
        collectors = [WorkerInfo("collector", index, 0, f"collector/{index}") for index in range(count - 1)]
        self._infos = [WorkerInfo("learner", 0, 0, "learner/0"), *collectors]

    def list_workers(self) -> list[WorkerInfo]:
        """All."""
        return self._infos

    def scale(self, role: str, n: int) -> None:
        """They are there, until the end."""
        if n == 0:
            self._infos = [info for info in self._infos if info.role != role]

    def replace(self, key: WorkerKey) -> None:
        """They stay."""

    def release(self, key: WorkerKey) -> None:
        """They stay."""

    def close(self) -> None:
        """They stay."""


class Replay:
    """Gives keys as fast as they are drawn."""

    fetches_by_key = True
    is_saved_by_learner = False

    def __init__(self) -> None:
        self._keys = np.zeros((256, 3), np.int64)
        self._probabilities = np.ones(256)

    def draw(self, timeout: float = 0.0) -> BatchMeta:
        """A batch of 256."""
        return BatchMeta(self._keys, self._probabilities)

    def release(self, keys: np.ndarray) -> None:
        """Nothing is kept."""

    def note_update(self, keys: np.ndarray, version: int) -> None:
        """Nothing is kept."""

    def stats(self) -> dict[str, int]:
        """Nothing is counted."""
        return {"items": 0}


def main() -> None:
    """Measures, and prints one line of JSON."""
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
        coordinator._job.requests.count_is_manual = True  # they are as many as they are
        threading.Thread(target=coordinator.run, daemon=True).start()
        deadline = time.monotonic() + 60.0
        while len(workers._steps) < collectors:
            assert time.monotonic() < deadline, f"{len(workers._steps)} of {collectors} collectors are at work"
            time.sleep(0.05)
        time.sleep(min(1.0, args.seconds / 4))
        before, watch = workers.answers, Stopwatch()
        workers.waits.clear()
        time.sleep(args.seconds)
        measured = watch.rate(workers.answers - before)
        median, worst = np.percentile(np.array(workers.waits) * 1e3, [50, 99])
        coordinator.close()
    measured["messages_per_second"] = measured.pop("steps_per_second")
    print(json.dumps({**measured, "median_ms": median, "worst_ms": worst}))


if __name__ == "__main__":
    main()
