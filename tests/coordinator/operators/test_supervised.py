"""Tests of the base of operators with fake workers and simulated time."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlframe.coordinator.operators import supervised
from rlframe.coordinator.operators.supervised import SupervisedOperator
from rlframe.engines.supervision import supervisor
from rlframe.engines.supervision.nodes import OnExit, RunningNode
from rlframe.engines.supervision.supervisor import Backoff
from rlframe.errors import UsageError
from tests.in_process import InProcess

BACKOFF = Backoff(first=1.0, longest=4.0, healthy=100.0)
GRACE = SupervisedOperator.grace

Key = tuple[str, int]


class Time:
    """A replacement of the module `time` for the supervisor."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Worker(RunningNode):
    """A fake worker that ends when it is killed, or when the test ends it."""

    def __init__(self, operator: ManualOperator, key: Key, on_exit: OnExit) -> None:
        super().__init__(key[0], None, lambda *_: None)
        self.operator, self.key, self.on_exit, self.pid = operator, key, on_exit, 1
        self.began = operator.time.now

    def send(self, number: int) -> None:
        if self.key in self.operator.alive and number in (signal.SIGKILL, signal.SIGTERM):
            (self.operator.killed if number == signal.SIGKILL else self.operator.terminated).append(self.key)
            if number == signal.SIGKILL:
                self.end(-signal.SIGKILL)

    def end(self, code: int = 1) -> None:
        self.code = code
        del self.operator.alive[self.key]
        self.on_exit(self)

    def wait(self) -> None:
        assert self.code is not None

    def uptime(self) -> float:
        return self.operator.time.now - self.began


class Node:
    """A fake `StartableNode`."""

    def __init__(self, operator: ManualOperator, index: int, incarnation: int) -> None:
        self.operator, self.key = operator, (f"collector/{index}", incarnation)

    def start(self, heartbeat: object, on_exit: OnExit, take_line: object) -> Worker:
        self.operator.started.append(self.key)
        if self.operator.start_error is not None:
            raise self.operator.start_error
        self.operator.alive[self.key] = worker = Worker(self.operator, self.key, on_exit)
        return worker


class ManualOperator(SupervisedOperator):
    """An operator without a running thread. The test advances it with `round`."""

    def __init__(self) -> None:
        self.time = Time()
        self.alive: dict[Key, Worker] = {}
        self.started: list[Key] = []
        self.killed: list[Key] = []
        self.terminated: list[Key] = []
        self.start_error: Exception | None = None
        super().__init__({"collector": lambda *which: Node(self, *which)}, InProcess(), f"operator-{id(self)}")
        self.backoff = BACKOFF
        supervised.time = supervisor.time = self.time  # type: ignore[assignment]

    def close(self) -> None:
        supervised.time = supervisor.time = time  # type: ignore[assignment]
        super().close()

    def _run(self) -> None:
        """Do nothing, because the test calls `round`."""

    def round(self, after: float = 0.0) -> None:
        self.time.now += after
        for _ in range(8):
            self.events.put(supervised._wake)
            self.step()

    def live(self) -> list[Key]:
        return sorted(worker.key for worker in self.list_workers() if worker.is_live)

    def problems(self) -> list[str]:
        return [worker.problem for worker in self.list_workers() if worker.problem]

    def due_in(self) -> float:
        waiting = [slot.deadline for slot in self.slots.values() if slot.state == "WAITING"]
        return min(waiting, default=float("inf")) - self.time.now


@pytest.fixture
def operator() -> Iterator[ManualOperator]:
    made = ManualOperator()
    yield made
    made.close()


def start_workers(operator: ManualOperator, n: int) -> ManualOperator:
    operator.scale("collector", n)
    operator.round()
    return operator


def test_repeated_request_starts_no_more_workers(operator: ManualOperator):
    start_workers(operator, 2)
    operator.scale("collector", 2)
    operator.round()
    assert operator.started == [("collector/0", 0), ("collector/1", 0)] == operator.live()


def test_workers_of_an_unrequested_role_are_not_started(operator: ManualOperator):
    operator.round(1000.0)
    assert operator.started == []
    operator.scale("learner", 0)
    with pytest.raises(UsageError, match="no workers of the role 'learner', only collector"):
        operator.scale("learner", 1)


def test_backoff_doubles_after_early_deaths_and_resets_after_a_long_life(operator: ManualOperator):
    start_workers(operator, 1)
    delays = []
    for incarnation in range(5):
        operator.alive["collector/0", incarnation].end()
        operator.round()
        assert operator.live() == []
        delays.append(operator.due_in())
        operator.round(delays[-1])
    assert delays == [1.0, 2.0, 4.0, 4.0, 4.0]
    assert operator.live() == [("collector/0", 5)] and "5 times" in operator.problems()[0]
    operator.round(101.0)
    assert operator.problems() == []
    operator.alive["collector/0", 5].end()
    operator.round()
    assert operator.due_in() == 1.0
    operator.round(1.0)
    assert operator.live() == [("collector/0", 6)]


def test_repeated_replace_calls_replace_a_worker_once(operator: ManualOperator):
    start_workers(operator, 2)
    for _ in range(3):
        operator.replace(("collector/1", 0))
        operator.round()
    operator.round(1.0)
    operator.replace(("collector/1", 0))
    operator.round()
    assert operator.killed == [("collector/1", 0)]
    assert operator.live() == [("collector/0", 0), ("collector/1", 1)]


def test_workers_continue_after_a_lower_request_but_dead_workers_are_not_replaced(operator: ManualOperator):
    start_workers(operator, 3)
    operator.scale("collector", 2)
    operator.round()
    assert len(operator.live()) == 3
    operator.alive["collector/0", 0].end()
    operator.round(10.0)
    operator.round(10.0)
    assert operator.live() == [("collector/1", 0), ("collector/2", 0)]
    assert operator.due_in() == float("inf") and operator.problems() == []


def test_released_worker_is_terminated_then_killed_and_its_index_is_reused_later(operator: ManualOperator):
    start_workers(operator, 2)
    operator.scale("collector", 1)
    for _ in range(2):
        operator.release(("collector/0", 0))
        operator.round()
    assert operator.terminated == [("collector/0", 0)] and operator.live() == [("collector/1", 0)]
    start_workers(operator, 2)
    assert operator.live() == [("collector/1", 0), ("collector/2", 0)]
    operator.round(GRACE + 1.0)
    assert operator.killed == [("collector/0", 0)]
    start_workers(operator, 3)
    assert operator.live() == [("collector/0", 1), ("collector/1", 0), ("collector/2", 0)]


@pytest.mark.parametrize("error", [OSError("no room"), RuntimeError("Ray is gone")])
def test_failed_start_is_retried(operator: ManualOperator, error: Exception):
    operator.start_error = error
    start_workers(operator, 1)
    assert operator.problems() == [f"collector/0 could not be started: {type(error).__name__}: {error}."]
    assert operator.live() == []
    operator.start_error = None
    operator.round(1.0)
    assert operator.started == [("collector/0", 0), ("collector/0", 1)] and operator.live() == [("collector/0", 1)]


class Schedules(RuleBasedStateMachine):
    """Random sequences of requests and failures."""

    def __init__(self) -> None:
        super().__init__()
        self.operator = ManualOperator()
        self.wanted = 0
        self.allowed_to_end: set[Key] = set()

    def teardown(self) -> None:
        self.operator.close()

    @rule(n=st.integers(0, 4))
    def request(self, n: int) -> None:
        self.operator.scale("collector", n)
        self.wanted = n

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 200.0]))
    def round(self, seconds: float) -> None:
        self.operator.round(seconds)

    @precondition(lambda self: self.operator.started)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.operator.started))
        self.allowed_to_end.add(key)
        self.operator.replace(key)

    @precondition(lambda self: self.operator.started)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.operator.started))
        self.allowed_to_end.add(key)
        self.operator.release(key)

    @precondition(lambda self: self.operator.alive)
    @rule(data=st.data(), code=st.sampled_from([0, 1, 4, -9]))
    def die(self, data: st.DataObject, code: int) -> None:
        self.operator.alive[data.draw(st.sampled_from(sorted(self.operator.alive)))].end(code)

    @rule(is_full=st.booleans())
    def fill(self, is_full: bool) -> None:
        self.operator.start_error = OSError("no room") if is_full else None

    @rule()
    def settle(self) -> None:
        """Check that after the last event enough workers run, and that no more workers start."""
        self.operator.start_error = None
        for _ in range(6):
            self.operator.round(GRACE + 1.0)
        live = self.operator.live()
        assert len(live) >= self.wanted
        assert sorted(self.operator.alive) == live  # no other process exists
        before = list(self.operator.started)
        self.operator.round(GRACE)
        assert self.operator.started == before

    @invariant()
    def incarnations_of_a_worker_are_unique_and_rise(self) -> None:
        for worker_id in {key[0] for key in self.operator.started}:
            incarnations = [key[1] for key in self.operator.started if key[0] == worker_id]
            assert incarnations == sorted(set(incarnations))

    @invariant()
    def no_worker_has_two_processes(self) -> None:
        ids = [key[0] for key in self.operator.alive]
        assert len(ids) == len(set(ids))

    @invariant()
    def only_released_and_replaced_workers_are_ended(self) -> None:
        assert set(self.operator.killed + self.operator.terminated) <= self.allowed_to_end


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
