"""A simulation for tests of the state machine: workers, an operator, a replay buffer and a param store.

The time is simulated. Workers follow the protocol: they do one call at a time, keep the last reply, and refuse older
calls. The operator behaves like `LocalOperator`. All parts check their inputs, and raise AssertionError on errors.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from rlframe.coordinator.commander import TrainOne
from rlframe.coordinator.config import Limits
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.job import TrainingJob
from rlframe.coordinator.core.machine import advance
from rlframe.coordinator.messages import (
    Alive,
    BatchMeta,
    CallRefused,
    Closed,
    Collected,
    Demand,
    Evaluated,
    Failed,
    Header,
    Learned,
    NotReady,
    Resources,
    Started,
    StartTask,
    Update,
    WorkerInfo,
    WorkerKey,
    WorkerReply,
)
from rlframe.coordinator.states import TRANSITIONS, JobState, TaskState, WorkerState, is_over

LIMITS = Limits(close_deadline=30.0, evaluation_deadline=120.0, healthy_after=5.0, max_failures=5)
TICK, JOURNAL_EVERY, LIST_EVERY = 0.25, 0.1, 0.25  # seconds


class Store:
    """The newest version of a policy, and the pinned versions."""

    def __init__(self) -> None:
        self.newest, self.pins = -1, list[int]()

    def put(self, version: int) -> None:
        assert version > self.newest, f"version {version} was put after {self.newest}"
        self.newest = version

    def pin(self) -> int:
        if self.newest >= 0:
            self.pins.append(self.newest)
        return self.newest

    def unpin(self, version: int) -> None:
        assert version in self.pins, f"version {version} was unpinned, but the pins are {self.pins}"
        self.pins.remove(version)


class Buffer:
    """A bounded queue of items. A new item evicts the oldest item that is not drawn."""

    CAPACITY, BATCH = 60, 4

    def __init__(self) -> None:
        self.items: list[int] = []
        self.added = self.evicted = self.consumed = self.drawn = 0
        self.out: dict[int, int] = {}  # unfinished batches: number -> items
        self.settled = self.orphans = 0
        self.raises = ""  # message of the error that each draw by the coordinator raises

    def add(self, count: int, source: str) -> None:
        assert source == "collect", f"{source} data reached the buffer"
        self.items += range(self.added, self.added + count)
        self.added += count
        excess = max(len(self.items) - self.CAPACITY, 0)
        del self.items[:excess]
        self.evicted += excess
        self.check()

    def take(self) -> np.ndarray | None:
        """Draw a batch, for the learner or the coordinator. The batch's number is its key."""
        if len(self.items) < self.BATCH:
            return None
        del self.items[: self.BATCH]
        self.consumed += self.BATCH
        self.drawn += 1
        self.check()
        return np.array([[self.drawn, 0, 0]])

    def draw(self) -> BatchMeta | None:
        keys = self.take()
        if keys is None:
            return None
        self.out[int(keys[0, 0])] = self.BATCH
        return BatchMeta(keys, np.ones(1))

    def settle(self, batches: tuple[BatchMeta, ...]) -> None:
        for batch in batches:
            number = int(batch.keys[0, 0])
            assert number in self.out, f"batch {number} was finished twice, or never drawn"
            del self.out[number]
            self.settled += 1

    def restart(self) -> None:
        """Forget the unfinished batches of the last coordinator."""
        self.orphans += len(self.out)
        self.out.clear()

    def check(self) -> None:
        assert self.added == len(self.items) + self.evicted + self.consumed


@dataclasses.dataclass
class Work:
    """The work of a call, and its reply."""

    header: Header
    method: str
    do: Callable[[], WorkerReply | None]  # function that returns the reply, or None if the work waits for data
    done_at: float
    reply: WorkerReply | None = None
    found_nothing: bool = False  # the work waits for data, and runs again when the call is repeated


class SimWorker:
    """A simulated worker process. The work advances when the worker is called."""

    def __init__(self, sim: Simulation, worker_id: str, role: str, index: int, incarnation: int) -> None:
        self.sim, self.worker_id, self.role, self.index, self.incarnation = sim, worker_id, role, index, incarnation
        self.address: str | None = None
        self.is_dead = self.is_stopped = self.is_doomed = False
        self.heard: list[Callable[[], None]] = []  # calls that arrived while the process was stopped
        self.work: Work | None = None
        self.task: tuple[str, int] | None = None
        self.start: StartTask | None = None
        self.started: Started | None = None
        self.result: dict[str, Any] | None = None
        self.ends_waits = False
        self.done = 0
        self.steps = self.version = 0  # learner only
        self.counts = dict.fromkeys(("env_steps", "episodes", "return_sum", "length_sum"), 0.0)
        self.rank_incarnation = 0
        self.fails: Failed | None = None  # failure with which the next work ends
        self.max_seq = -1

    @property
    def key(self) -> tuple[str, int]:
        return self.worker_id, self.incarnation

    # --- the protocol

    def call(self, method: str, header: Header | None, args: tuple[Any, ...]) -> WorkerReply:
        self._work_on(header.seq if header is not None else -1)
        if method == "ping":
            return self._ping()
        if method == "resources":
            return Resources("sim", 1)
        assert header is not None
        refusal = self._refusal(header, method)
        if refusal:
            return CallRefused(refusal)
        return self._call(method, header, args)

    def _ping(self) -> Alive:
        if self.task is None or self.result is not None:
            return Alive(self.worker_id, self.incarnation, "idle")
        phase = "starting" if self.started is None else "running"
        return Alive(self.worker_id, self.incarnation, phase, *self.task)

    def _refusal(self, header: Header, method: str) -> str:
        if (header.worker_id, header.incarnation) != self.key:
            return "another worker"
        if self.work is not None and header.seq < self.work.header.seq:
            return "late"
        if self.work is not None and header.seq == self.work.header.seq:
            return "" if (header, method) == (self.work.header, self.work.method) else "another call"
        called = (header.task_id, header.attempt)
        if self.task is None:
            return "" if method == "start_task" else "not started"
        if header.task_id == self.task[0] and header.attempt < self.task[1]:
            return "older attempt"
        if method != "start_task" and called != self.task:
            return "another task"
        if called == self.task and self.result is not None and method != "close_task":
            return "" if method == "start_task" and self.started is None else "it has ended"
        return ""

    def _call(self, method: str, header: Header, args: tuple[Any, ...]) -> WorkerReply:
        work = self.work
        if work is not None and work.reply is None and (not self._waits or header.seq == work.header.seq):
            if header.seq == work.header.seq:
                return NotReady("data" if self._waits else None)
            if method in ("start_task", "close_task"):
                self.ends_waits = True
                self._work_on(header.seq)
            if work.reply is None:
                return NotReady()
        if work is not None and work.header.seq == header.seq:
            assert work.reply is not None
            return work.reply
        self.max_seq = header.seq
        takes = self.sim.work_seconds(method, self)
        self.work = Work(header, method, lambda: self._do(method, header, args), self.sim.now + takes)
        self._work_on(header.seq)
        return self.work.reply or NotReady()

    @property
    def _waits(self) -> bool:
        return self.work is not None and self.work.reply is None and self.work.found_nothing

    def _work_on(self, asked_by: int) -> None:
        work = self.work
        if work is None or work.reply is not None or self.is_stopped or self.is_dead:
            return
        if work.found_nothing and asked_by != work.header.seq:
            return
        if self.sim.now < work.done_at and not (self.ends_waits and work.method == "learn"):
            return
        if self.fails is not None:
            work.reply, self.fails = self.fails, None
        else:
            work.reply = work.do()
        work.found_nothing = work.reply is None
        self.done += work.reply is not None

    # --- the work

    def _do(self, method: str, header: Header, args: tuple[Any, ...]) -> WorkerReply | None:
        if method == "start_task":
            return self._start(header, args[0])
        if method == "data_demand":
            return Demand(self.sim.rng.choice([0, 1, 3, 8]))
        if method == "learn":
            return self._learn(args[0])
        if method == "get_data":
            return self._evaluate() if self.role == "evaluator" else self._collect()
        assert method == "close_task"
        if self.result is None:
            self.result = self._close(args[0])
        return Closed(self.result)

    def _start(self, header: Header, start: StartTask) -> WorkerReply:
        if self.started is not None and self.task == (header.task_id, header.attempt):
            return self.started
        self.task, self.start, self.result, self.ends_waits = (header.task_id, header.attempt), start, None, False
        self.sim.check_one_live_attempt(self)
        info: dict[str, Any] = {}
        if self.role == "learner":
            assert start.kind == "learn"
            attempt, opened = (start.options["epoch"], header.attempt), self.sim.opened.get(start.policy_id, (-1, 0))
            assert attempt > opened, f"{self.key} starts as {attempt}, after {opened}"
            self.sim.opened[start.policy_id] = attempt
            self.steps, saved = self.sim.checkpoint
            self.version = max(saved, start.options["min_version"] + 1, self.sim.store.newest + 1)
            self.sim.store.put(self.version)
            self.sim.learner_started = True
            info = {"learner_steps": self.steps, "params_version": self.version}
        elif self.role == "collector":
            assert start.kind == "collect"
            assert self.sim.store.newest >= 0, "a collector started before the first version"
            self.rank_incarnation = next(self.sim.claims)
            self.counts = dict.fromkeys(self.counts, 0.0)
        else:
            assert start.kind == "evaluate"
            assert start.options["params_version"] in self.sim.store.pins, "the version is not pinned"
        self.started = Started(info)
        return self.started

    def _learn(self, request: Any) -> WorkerReply | None:
        taken: list[np.ndarray] = []
        dropped = 0
        if request.batches is not None:
            assert len(request.batches) == request.count
            for batch in request.batches:
                if self.sim.rng.random() < 0.1:
                    dropped += 1
                else:
                    taken.append(batch.keys)
        else:
            while len(taken) < request.count and (keys := self.sim.buffer.take()) is not None:
                taken.append(keys)
            if request.count and not taken and not self.ends_waits:
                return None
        if taken:
            self.steps += len(taken)
            self.version += len(taken)
            self.sim.store.put(self.version)
        if request.save or self.sim.rng.random() < 0.2:
            self.sim.checkpoint = (self.steps, self.version)
            self.sim.saved.add(self.version)
        return Learned(self.version, self.steps, tuple(Update(keys) for keys in taken), dropped, {"loss": 1.0})

    def _collect(self) -> WorkerReply:
        steps = 10
        self.sim.buffer.add(steps, "collect")
        self.counts["env_steps"] += steps
        self.counts["episodes"] += 1
        self.counts["return_sum"] += 5
        self.counts["length_sum"] += steps
        return Collected(self._stats(), self.sim.store.newest, waits=False, length=steps)

    def _stats(self) -> dict[str, Any]:
        logged = {"speed": [3.0 * self.counts["env_steps"], self.counts["env_steps"]]}
        return {**self.counts, "rank": self.index, "incarnation": self.rank_incarnation, "logged": logged}

    def _evaluate(self) -> WorkerReply:
        assert self.start is not None
        version = self.start.options["params_version"]
        assert version in self.sim.store.pins, "the version is no longer pinned"
        values = {"return_mean": float(version), "return_std": 0.0, "length_mean": 1.0, "episodes": 1.0}
        return Evaluated(version, values)

    def _close(self, final: bool) -> dict[str, Any]:
        self.started = None if self.started is None else self.started
        if self.role == "learner":
            if final:
                self.sim.checkpoint = (self.steps, self.version)
            return {"learner_steps": self.steps, "params_version": self.version}
        return self._stats() if self.role == "collector" else {}


class SimOperator:
    """A simulated operator. It restarts dead and reported workers, and ends released ones."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.wanted: dict[str, int] = {}
        self.slots: dict[str, SimWorker | None] = {}  # None while a worker starts
        self.incarnations: dict[str, int] = {}
        self.is_out = False
        self.is_over = False
        self.never_comes: set[str] = set()  # roles whose workers never have an address
        self.never_starts: set[str] = set()  # roles whose processes never start

    def list_workers(self) -> tuple[WorkerInfo, ...]:
        workers = [worker for worker in self.slots.values() if worker is not None and not worker.is_dead]
        return tuple(
            WorkerInfo(w.role, w.index, w.incarnation, w.address, "sim", 1)  # type: ignore[arg-type]
            for w in sorted(workers, key=lambda w: w.worker_id)
        )

    def scale(self, role: str, count: int) -> None:
        self.wanted[role] = count

    def replace(self, key: tuple[str, int]) -> None:
        worker = self.slots.get(key[0])
        if worker is not None and worker.key == key:
            worker.is_dead = True

    def release(self, key: tuple[str, int]) -> None:
        worker = self.slots.get(key[0])
        if worker is not None and worker.key == key:
            del self.slots[key[0]]
            self.sim.later(0.5, lambda: self._end(worker))

    def _end(self, worker: SimWorker) -> None:
        worker.is_dead = True

    def disconnect(self) -> None:
        self.is_over = True
        for worker in self.slots.values():
            if worker is not None:
                worker.is_dead = True
        self.slots.clear()

    def reconcile(self) -> None:
        if self.is_over:
            return
        for worker_id, worker in list(self.slots.items()):
            if worker is not None and worker.is_dead:
                self._begin(worker_id, worker.role, worker.index)
        for role, wanted in self.wanted.items():
            starting = [worker_id for worker_id in self.slots if worker_id.startswith(role)]
            index = 0
            while len(starting) < wanted and role not in self.never_starts:
                worker_id = f"{role}/{index}"
                if worker_id not in self.slots:
                    self._begin(worker_id, role, index)
                    starting.append(worker_id)
                index += 1

    def _begin(self, worker_id: str, role: str, index: int) -> None:
        incarnation = self.incarnations[worker_id] = self.incarnations.get(worker_id, -1) + 1
        self.slots[worker_id] = None

        def up() -> None:
            if self.is_over or worker_id not in self.slots or self.incarnations[worker_id] != incarnation:
                return
            alive = [slot for slot, one in self.slots.items() if slot.startswith(role) and one is not None]
            if len(alive) >= self.wanted.get(role, 0):  # this worker is no longer requested
                del self.slots[worker_id]
                return
            worker = SimWorker(self.sim, worker_id, role, index, incarnation)
            self.slots[worker_id] = worker
            self.sim.all_workers.append(worker)
            if role not in self.never_comes:
                self.sim.later(self.sim.rng.uniform(0.1, 2.0), lambda: setattr(worker, "address", worker_id))

        self.sim.later(self.sim.rng.uniform(0.1, 1.0), up)


class Simulation:
    """A simulation of all processes around a job. It checks the job's invariants after each event."""

    def __init__(
        self,
        *,
        seed: int = 0,
        by_key: bool = True,
        commander: Any = None,
        collectors: int = 1,
        limits: Limits = LIMITS,
        trouble: float = 0.0,
    ) -> None:
        self.now, self.rng, self.by_key, self.trouble = 1000.0, random.Random(seed), by_key, trouble
        self.commander = commander or TrainOne(env_steps=2000, eval_every=500)
        self.limits = limits
        self.store, self.buffer, self.operator = Store(), Buffer(), SimOperator(self)
        self.all_workers: list[SimWorker] = []
        self.checkpoint = (0, 0)
        self.saved: set[int] = set()  # versions that were saved in checkpoints
        self.claims = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._wanted = {"learner": 1, "collector": collectors}
        self.sent: list[ev.Send] = []
        self.notes: list[ev.Note] = []
        self.rows: list[ev.Row] = []
        self.over: list[ev.Over] = []
        self.old_answers: list[ev.Replied] = []  # replies that tests deliver a second time
        self.learner_started = False
        self.opened: dict[str, tuple[int, int]] = {}  # policy -> (epoch, attempt) of the policy's newest learner
        self.journal: dict[str, Any] | None = None
        self.journaled_at = -1e9
        self.maybe_job: TrainingJob | None = None
        self.life = 0
        self.loses_effects = False  # if True, kill the coordinator before the effects of the next event
        self._seen_states: dict[Any, Any] = {}
        self._floor: dict[str, float] = {}
        self._seqs: dict[tuple[str, int], int] = {}
        self.pinned = self.unpinned = self.lost_pins = 0
        self.updates = 0  # number of updates in finished batches
        self.evaluated: dict[str, int] = {}
        self.start_coordinator()
        self._every(LIST_EVERY, self._operator_round)
        self._every(TICK, self._tick)

    # --- time

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), do))

    def _every(self, seconds: float, do: Callable[[], None]) -> None:
        def again() -> None:
            do()
            self.later(seconds, again)

        self.later(seconds, again)

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass until `until()` is true, but at most `seconds`. Return True if `until()` became true."""
        end = self.now + seconds
        while not until():
            if self._queue[0][0] > end:
                self.now = end
                return until()
            at, _, do = heapq.heappop(self._queue)
            self.now = max(self.now, at)
            do()
        return True

    # --- the coordinator

    @property
    def job(self) -> TrainingJob:
        assert self.maybe_job is not None
        return self.maybe_job

    def start_coordinator(self) -> None:
        if self.maybe_job is not None:
            return
        self.life += 1
        saved = json.loads(json.dumps(self.journal)) if self.journal is not None else None
        self.maybe_job = TrainingJob(
            self.commander,
            self.limits,
            self._wanted,
            by_key=self.by_key,
            now=self.now,
            saved=saved,  # type: ignore[arg-type]
        )
        self._seen_states = {}
        self.buffer.restart()
        self._check_floor()
        self.deliver(ev.Submitted())

    def kill_coordinator(self) -> None:
        self.maybe_job = None
        self.life += 1

    def deliver(self, event: Any) -> None:
        """Pass an event to the coordinator if the coordinator runs."""
        job = self.maybe_job
        if job is None:
            return
        before_over = is_over(job.state)
        effects = advance(job, event, self.now)
        assert not (before_over and effects), "a job that is over returned effects"
        self._check(job)
        if any(isinstance(effect, ev.Note) for effect in effects) or self.now > self.journaled_at + JOURNAL_EVERY:
            self.journal, self.journaled_at = json.loads(json.dumps(job.to_json())), self.now
            self._note_floor(job)
        self.notes += [effect for effect in effects if isinstance(effect, ev.Note)]
        if self.loses_effects:
            self.loses_effects = False
            self.kill_coordinator()
            return
        for effect in effects:
            self._execute(effect)

    def _tick(self) -> None:
        self.deliver(ev.Ticked())

    def _operator_round(self) -> None:
        if self.operator.is_out:
            if not self.operator.is_over:
                self.deliver(ev.OperatorFailed("it is away"))
            return
        self.operator.reconcile()
        if not self.operator.is_over:
            self.deliver(ev.OperatorAnswered(self.operator.list_workers()))

    def _execute(self, effect: Any) -> None:
        life = self.life
        if isinstance(effect, ev.Send):
            self._check_send(effect)
            self.sent.append(effect)
            self.later(effect.delay + self._latency(), lambda: self._arrive(effect, life))
        elif isinstance(effect, (ev.ScaleRole, ev.Replace, ev.Release, ev.EndWorkers)):
            self._tell_operator(effect, life)
        elif isinstance(effect, ev.DrawBatches):
            self._soon(lambda: self._drawn(effect), life)
        elif isinstance(effect, ev.FinishBatches):
            self.buffer.settle(effect.batches)
            self.updates += len(effect.updates)
        elif isinstance(effect, ev.Pin):
            version = self.store.pin()
            self.pinned += version >= 0
            self._soon(lambda: ev.Pinned(effect.task_id, effect.policy_id, version), life)
        elif isinstance(effect, ev.Unpin):
            self.store.unpin(effect.params_version)
            self.unpinned += 1
        elif isinstance(effect, ev.Row):
            self.rows.append(effect)
        elif isinstance(effect, ev.Over):
            self.over.append(effect)

    def _soon(self, event: Callable[[], Any], life: int) -> None:
        def do() -> None:
            if self.life == life:
                self.deliver(event())

        self.later(self._latency(), do)

    def _drawn(self, effect: ev.DrawBatches) -> ev.BatchesDrawn:
        if self.buffer.raises:
            return ev.BatchesDrawn(effect.header, (), self.buffer.raises)
        return ev.BatchesDrawn(effect.header, self._draw(effect.count))

    def _draw(self, count: int) -> tuple[BatchMeta, ...]:
        drawn = []
        while len(drawn) < count and (batch := self.buffer.draw()) is not None:
            drawn.append(batch)
        return tuple(drawn)

    def _tell_operator(self, effect: Any, life: int) -> None:
        """Carry out an operator's effect. Repeat it later during an outage."""
        if life != self.life:
            return
        operator = self.operator
        if operator.is_out and isinstance(effect, ev.EndWorkers):  # the operator thread gives up after a while
            self.later(10.0, lambda: self._soon(lambda: ev.WorkersEnded("it is away"), life))
        elif operator.is_out:
            self.later(0.5, lambda: self._tell_operator(effect, life))
        elif isinstance(effect, ev.ScaleRole):
            operator.scale(effect.role, effect.count)
        elif isinstance(effect, ev.Replace):
            operator.replace(effect.key)
        elif isinstance(effect, ev.Release):
            operator.release(effect.key)
        else:
            operator.disconnect()
            self._soon(ev.WorkersEnded, life)

    # --- network

    def _latency(self) -> float:
        return self.rng.uniform(0.0005, 0.01) if self.rng.random() < 0.95 else self.rng.uniform(0.01, 0.4)

    def work_seconds(self, method: str, worker: SimWorker) -> float:
        return {"start_task": 3.0, "get_data": 2.0 if worker.role == "evaluator" else 0.25, "learn": 0.1}.get(
            method, 0.01
        ) * self.rng.uniform(0.5, 1.5)

    def _find(self, key: WorkerKey) -> SimWorker | None:
        return next((w for w in self.all_workers if w.key == key), None)

    def _arrive(self, send: ev.Send, life: int) -> None:
        worker = self._find(send.key)
        who = (send.key, send.method, send.header)

        def answer(event: Any, seconds: float) -> None:
            def do() -> None:
                if life == self.life:
                    self.deliver(event)

            self.later(seconds, do)

        if worker is None or worker.is_dead:
            answer(ev.Unanswered(*who), self._latency())
            return
        if worker.is_stopped:
            worker.heard.append(lambda: self._arrive(send, life))
            return
        luck = self.rng.random()
        if luck < self.trouble / 3:  # the call is lost
            answer(ev.Unanswered(*who), self._latency())
            return
        reply = worker.call(send.method, send.header, send.args)
        if luck < self.trouble * 2 / 3:  # the reply is lost
            answer(ev.Unanswered(*who), self._latency())
            return
        event = ev.Replied(*who, reply)
        self.old_answers = [*self.old_answers[-30:], event]
        answer(event, self._latency())
        if luck < self.trouble:  # the reply arrives twice
            answer(event, self._latency() + self.rng.random())

    # --- failures of workers

    def live(self, role: str | None = None) -> list[SimWorker]:
        """Return the live workers of the operator."""
        slots = sorted(self.operator.slots.items())
        return [w for _, w in slots if w is not None and not w.is_dead and (role is None or w.role == role)]

    def kill(self, worker: SimWorker) -> None:
        worker.is_dead = True

    def stop(self, worker: SimWorker) -> None:
        worker.is_stopped = True

    def resume(self, worker: SimWorker) -> None:
        worker.is_stopped = False
        heard, worker.heard = worker.heard, []
        for each in heard:
            each()

    # --- invariants

    def check_one_live_attempt(self, worker: SimWorker) -> None:
        """Check that no other worker has started the same attempt or a later attempt."""
        assert worker.task is not None
        for other in self.all_workers:
            if other is not worker and other.task is not None and other.task[0] == worker.task[0]:
                assert other.task[1] < worker.task[1], f"{worker.key} starts {worker.task}, which {other.key} had"

    def _check_send(self, send: ev.Send) -> None:
        if send.header is None:
            return
        assert (send.header.worker_id, send.header.incarnation) == send.key
        last = self._seqs.get(send.key, -1)
        assert send.header.seq >= last, f"{send.key} was called with {send.header.seq} after {last}"
        self._seqs[send.key] = send.header.seq
        if send.method == "start_task" and send.args[0].kind == "collect":
            assert self.learner_started, "a collector started before a learner"

    def _floors(self, accounts: Any) -> dict[str, float]:
        return {"env_steps": accounts.env_steps, "params_version": accounts.params_version}

    def _note_floor(self, job: TrainingJob) -> None:
        self._floor = self._floors(job.accounts)

    def _check_floor(self) -> None:
        for name, value in self._floors(self.job.accounts).items():
            assert value >= self._floor.get(name, value), f"{name} fell to {value} from {self._floor[name]}"

    def _check(self, job: TrainingJob) -> None:
        self._check_floor()
        accounts = job.accounts
        tasks = list(job.tasks)
        out = sum(task.granted for task in tasks)
        assert accounts.granted == accounts.learned + accounts.dropped + accounts.lost + out, dataclasses.asdict(
            accounts
        )
        assert min(accounts.granted, accounts.learned, accounts.dropped, accounts.lost, out) >= 0
        at: dict[str, list[str]] = {}
        for worker in job.roster:
            if worker.task_id is not None and not is_over(worker.state):
                at.setdefault(worker.task_id, []).append(worker.worker_id)
        for task_id, workers in at.items():
            assert len(workers) == 1, f"{workers} have the task {task_id}"
        for task in tasks:
            if task.is_live:
                assert at.get(task.task_id) == [task.worker_id], (
                    f"{task} is live, but its worker is {at.get(task.task_id)}"
                )
            if not task.is_live:
                assert task.granted == 0 and not task.batches and task.drawing is None, task
        now = {("job",): job.state}
        now.update({("task", task.task_id): task.state for task in tasks})
        now.update({("worker", w.worker_id, w.incarnation): w.state for w in job.roster})
        for key, state in now.items():
            before = self._seen_states.get(key, state)
            if before is not state:
                assert not is_over(before), f"{key} changed from the final state {before} to {state}"
                assert state in _reachable(before), f"{key} changed from {before} to {state}"
        self._seen_states.update(now)

    @property
    def is_over(self) -> bool:
        return bool(self.over)


def _reachable(state: Any) -> set[Any]:
    """Return the states that are reachable in zero or more transitions. One event can cause several transitions."""
    found, rest = {state}, [state]
    while rest:
        for after in TRANSITIONS[rest.pop()]:
            if after not in found:
                found.add(after)
                rest.append(after)
    return found


__all__ = ["LIMITS", "JobState", "SimWorker", "Simulation", "TaskState", "WorkerState"]
