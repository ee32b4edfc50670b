"""Fakes for tests of the Coordinator, in one process: workers, an operator, a replay buffer and a param store."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rlframe.coordinator.messages import (
    Alive,
    BatchMeta,
    CallRefused,
    Closed,
    Collected,
    Demand,
    Evaluated,
    GetData,
    Header,
    Learn,
    Learned,
    NotReady,
    Resources,
    Started,
    StartTask,
    Update,
    WorkerInfo,
    WorkerReply,
)
from rlframe.coordinator.operators import OperatorError
from rlframe.errors import UnavailableError
from tests.in_process import InProcess

WITHIN = 60.0  # maximum seconds of any wait


CALLS = ("ping", "resources", "start_task", "data_demand", "learn", "get_data", "close_task")


class AnsweredCall(NamedTuple):
    """A line of the trace: a call and its final reply."""

    worker_id: str
    method: str
    header: Header | None
    reply: WorkerReply


class Replay:
    """A fake replay buffer that fetches by key, and counts items."""

    fetches_by_key = True
    is_saved_by_learner = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.added = self.drawn = 0
        self.out: list[int] = []
        self.updates: list[tuple[list[int], int]] = []  # (keys, version)
        self.writers: list[str] = []

    def add(self, worker_id: str) -> None:
        with self._lock:
            self.added += 1
            self.writers.append(worker_id)

    def draw(self, timeout: float = 0.0) -> BatchMeta | None:
        with self._lock:
            if self.drawn >= 2 * self.added:
                return None
            self.drawn += 1
            self.out.append(self.drawn)
            return BatchMeta(np.array([[self.drawn, 0, 0]]), np.ones(1))

    def release(self, keys: np.ndarray) -> None:
        with self._lock:
            self.out.remove(int(keys[0, 0]))

    def note_update(self, keys: np.ndarray, version: int) -> None:
        self.updates.append(([int(key) for key in keys[:, 0]], version))

    def stats(self) -> dict[str, int]:
        return {"items": self.added, "added": self.added, "sampled": self.drawn}


class Store:
    """A fake param store with versions and pins, without parameters."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.pins: list[int] = []
        self._lock = threading.Lock()

    def put(self, version: int) -> None:
        with self._lock:
            assert not self.versions or version > self.versions[-1], (version, self.versions[-1])
            self.versions.append(version)

    def pin(self, policy_id: str) -> int:
        with self._lock:
            if self.versions:
                self.pins.append(self.versions[-1])
            return self.versions[-1] if self.versions else -1

    def unpin(self, policy_id: str, version: int) -> None:
        with self._lock:
            self.pins.remove(version)


class FakeWorker:
    """A fake worker that replies at once. The test can make it hang, die, raise or wait."""

    def __init__(self, cluster: FakeCluster, role: str, index: int, incarnation: int) -> None:
        self.cluster, self.role, self.index, self.incarnation = cluster, role, index, incarnation
        self.worker_id = f"{role}/{index}"
        self.is_dead = False
        self.may_continue = threading.Event()
        self.may_continue.set()
        self.scripts: dict[str, Callable[[], WorkerReply]] = {}  # method -> function that returns a reply
        self._lock = threading.Lock()
        self._last: tuple[int, WorkerReply] | None = None
        self._task: tuple[str, int] | None = None
        self._runs = False
        self.start: StartTask | None = None
        self.env_steps = 0
        self.server = InProcess().serve({name: getattr(self, name) for name in CALLS})

    def ping(self) -> Alive:
        self._live()
        if not self._runs or self._task is None:
            return Alive(self.worker_id, self.incarnation, "idle")
        return Alive(self.worker_id, self.incarnation, "running", *self._task)

    def resources(self) -> Resources:
        self._live()
        return Resources("here", 1)

    def start_task(self, header: Header, request: StartTask) -> WorkerReply:
        return self._call("start_task", header, request)

    def data_demand(self, header: Header) -> WorkerReply:
        return self._call("data_demand", header)

    def learn(self, header: Header, request: Learn) -> WorkerReply:
        return self._call("learn", header, request)

    def get_data(self, header: Header, request: GetData) -> WorkerReply:
        return self._call("get_data", header, request)

    def close_task(self, header: Header, final: bool) -> WorkerReply:
        return self._call("close_task", header, final)

    def _live(self) -> None:
        if not self.may_continue.is_set():
            self.may_continue.wait(WITHIN)
        if self.is_dead:
            raise UnavailableError(f"{self.worker_id} is dead")

    def _call(self, method: str, header: Header, *args: Any) -> WorkerReply:
        self._live()
        with self._lock:
            if self._last is not None and header.seq <= self._last[0]:
                return self._last[1] if header.seq == self._last[0] else CallRefused("late")
            script = self.scripts.get(method)
            reply = script() if script is not None else getattr(self, f"_{method}")(header, *args)
            if not isinstance(reply, NotReady):
                if script is not None:
                    self.scripts.pop(method, None)
                self._last = (header.seq, reply)
                self.cluster.trace.append(AnsweredCall(self.worker_id, method, header, reply))
            return reply

    def _start_task(self, header: Header, request: StartTask) -> WorkerReply:
        self._task, self._runs, self.start = (header.task_id, header.attempt), True, request
        if self.role != "learner":
            assert self.cluster.store.versions, "the task started before the first version"
            return Started()
        newest = self.cluster.store.versions[-1] if self.cluster.store.versions else -1
        self.cluster.version = max(newest, request.options["min_version"]) + 1
        self.cluster.store.put(self.cluster.version)
        return Started({"params_version": self.cluster.version, "learner_steps": self.cluster.steps})

    def _data_demand(self, header: Header) -> WorkerReply:
        return Demand(4)

    def _learn(self, header: Header, request: Learn) -> WorkerReply:
        batches = request.batches or ()
        assert len(batches) == request.count and (batches or request.save)
        if batches:
            self.cluster.version += 1
            self.cluster.steps += request.count
            self.cluster.store.put(self.cluster.version)
        if request.save:
            self.cluster.saved = self.cluster.version
        updates = tuple(Update(batch.keys) for batch in batches)
        return Learned(self.cluster.version, self.cluster.steps, updates)

    def _get_data(self, header: Header, request: GetData) -> WorkerReply:
        assert self.start is not None
        if self.role == "evaluator":
            version = self.start.options["params_version"]
            assert version in self.cluster.store.pins
            return Evaluated(version, {"return_mean": 7.0, "return_std": 0.0, "length_mean": 1.0, "episodes": 1.0})
        time.sleep(0.01)  # collecting takes time
        self.env_steps += 1
        self.cluster.replay.add(self.worker_id)
        return Collected(self._stats(), self.cluster.version, length=1)

    def _close_task(self, header: Header, final: bool) -> WorkerReply:
        self._runs = False
        if self.role == "learner":
            self.cluster.saved = self.cluster.version if final else self.cluster.saved
            return Closed({"params_version": self.cluster.version, "learner_steps": self.cluster.steps})
        if self.role == "evaluator":
            return Closed()
        self.env_steps += 1000  # only the closing result includes these steps
        return Closed(self._stats())

    def _stats(self) -> dict[str, float]:
        counts = {"env_steps": self.env_steps, "episodes": 1, "return_sum": 5.0, "length_sum": 10}
        return {**counts, "rank": self.index, "incarnation": self.incarnation}


class FakeOperator:
    """A fake operator with workers in this process. See `Operator`."""

    transport = InProcess()
    every, grace = 0.05, 5.0

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster, self._lock = cluster, threading.Lock()
        self.is_out, self.held = False, set[str]()  # `held`: roles whose workers do not start yet
        self.wanted: dict[str, int] = {}
        self.workers: dict[str, FakeWorker] = {}
        self.made: list[tuple[str, int]] = []
        self.disconnects = 0

    def list_workers(self) -> list[WorkerInfo]:
        self._check()
        with self._lock:
            self.workers = {worker_id: worker for worker_id, worker in self.workers.items() if not worker.is_dead}
            for role in self.wanted.keys() - self.held:
                self._fill(role)
            return [
                WorkerInfo(worker.role, worker.index, worker.incarnation, worker.server.address, "here")
                for worker in self.workers.values()
            ]

    def _fill(self, role: str) -> None:
        missing = self.wanted[role] - len([worker for worker in self.workers.values() if worker.role == role])
        free = (index for index in itertools.count() if f"{role}/{index}" not in self.workers)
        for index in itertools.islice(free, max(0, missing)):
            worker_id = f"{role}/{index}"
            incarnation = len([made for made, _ in self.made if made == worker_id])
            self.made.append((worker_id, incarnation))
            self.workers[worker_id] = FakeWorker(self._cluster, role, index, incarnation)

    def scale(self, role: str, n: int) -> None:
        self._check()
        self.wanted[role] = n

    def replace(self, key: tuple[str, int]) -> None:
        self._drop(key, kill=True)

    def release(self, key: tuple[str, int]) -> None:
        self._drop(key, kill=False)

    def _drop(self, key: tuple[str, int], kill: bool) -> None:
        self._check()
        with self._lock:
            found = self.workers.get(key[0])
            if found is not None and found.incarnation == key[1]:
                found.is_dead = kill
                del self.workers[key[0]]

    def close(self) -> None:
        self.disconnects += 1

    def _check(self) -> None:
        if self.is_out:
            raise OperatorError("The operator is away.")


class FakeCluster:
    """A fake operator, workers, replay buffer and param store, and a trace of the calls."""

    def __init__(self) -> None:
        self.trace: list[AnsweredCall] = []
        self.replay, self.store = Replay(), Store()
        self.version = self.saved = -1
        self.steps = 0
        self.operator = FakeOperator(self)

    def worker(self, worker_id: str) -> FakeWorker:
        return self.operator.workers[worker_id]

    def calls(self, worker_id: str) -> list[str]:
        return [called.method for called in list(self.trace) if called.worker_id == worker_id]
