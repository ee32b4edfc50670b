"""The rules by which workers are started and ended, with scripted workers and simulated time."""

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
    """The module `time`, for the supervisor of a world."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Worker(RunningNode):
    """Ends at once when it is killed, and otherwise when the test ends it."""

    def __init__(self, world: World, key: Key, on_exit: OnExit) -> None:
        super().__init__(key[0], None, lambda *_: None)
        self.world, self.key, self.on_exit, self.pid = world, key, on_exit, 1
        self.began = world.time.now

    def send(self, number: int) -> None:
        if self.key in self.world.there and number in (signal.SIGKILL, signal.SIGTERM):
            (self.world.killed if number == signal.SIGKILL else self.world.told).append(self.key)
            if number == signal.SIGKILL:
                self.end(-signal.SIGKILL)

    def end(self, code: int = 1) -> None:
        self.code = code
        del self.world.there[self.key]
        self.on_exit(self)

    def wait(self) -> None:
        assert self.code is not None

    def uptime(self) -> float:
        return self.world.time.now - self.began


class Node:
    """See `StartableNode`."""

    def __init__(self, world: World, index: int, incarnation: int) -> None:
        self.world, self.key = world, (f"collector/{index}", incarnation)

    def start(self, heartbeat: object, on_exit: OnExit, take_line: object) -> Worker:
        self.world.begun.append(self.key)
        if self.world.start_error is not None:
            raise self.world.start_error
        self.world.there[self.key] = worker = Worker(self.world, self.key, on_exit)
        return worker


class World(SupervisedOperator):
    """An operator that is driven by `round`, not by its thread."""

    def __init__(self) -> None:
        self.time = Time()
        self.there: dict[Key, Worker] = {}
        self.begun: list[Key] = []
        self.killed: list[Key] = []
        self.told: list[Key] = []
        self.start_error: Exception | None = None
        super().__init__({"collector": lambda *which: Node(self, *which)}, InProcess(), f"world-{id(self)}")
        self.backoff = BACKOFF
        supervised.time = supervisor.time = self.time  # type: ignore[assignment]

    def close(self) -> None:
        supervised.time = supervisor.time = time  # type: ignore[assignment]
        super().close()

    def _run(self) -> None:
        """`round` takes the steps."""

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
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def has(world: World, n: int) -> World:
    world.scale("collector", n)
    world.round()
    return world


def test_as_many_are_started_as_are_wanted_and_repeating_it_starts_no_more(world: World):
    has(world, 2)
    world.scale("collector", 2)
    world.round()
    assert world.begun == [("collector/0", 0), ("collector/1", 0)] == world.live()


def test_nothing_is_started_of_a_role_that_nobody_asked_for(world: World):
    world.round(1000.0)
    assert world.begun == []
    world.scale("learner", 0)
    with pytest.raises(UsageError, match="no workers of the role 'learner', only collector"):
        world.scale("learner", 1)


def test_one_that_dies_young_is_replaced_later_and_later_and_one_that_lived_long_soon(world: World):
    has(world, 1)
    delays = []
    for incarnation in range(5):
        world.there["collector/0", incarnation].end()
        world.round()
        assert world.live() == []
        delays.append(world.due_in())
        world.round(delays[-1])
    assert delays == [1.0, 2.0, 4.0, 4.0, 4.0]
    assert world.live() == [("collector/0", 5)] and "5 times" in world.problems()[0]
    world.round(101.0)
    assert world.problems() == []
    world.there["collector/0", 5].end()
    world.round()
    assert world.due_in() == 1.0
    world.round(1.0)
    assert world.live() == [("collector/0", 6)]


def test_a_report_kills_once_and_replaces_once(world: World):
    has(world, 2)
    for _ in range(3):
        world.replace(("collector/1", 0))
        world.round()
    world.round(1.0)
    world.replace(("collector/1", 0))
    world.round()
    assert world.killed == [("collector/1", 0)]
    assert world.live() == [("collector/0", 0), ("collector/1", 1)]


def test_a_lower_request_ends_none_and_the_next_death_is_not_replaced(world: World):
    has(world, 3)
    world.scale("collector", 2)
    world.round()
    assert len(world.live()) == 3
    world.there["collector/0", 0].end()
    world.round(10.0)
    world.round(10.0)
    assert world.live() == [("collector/1", 0), ("collector/2", 0)]
    assert world.due_in() == float("inf") and world.problems() == []


def test_a_released_one_is_told_then_killed_and_its_index_waits_until_it_is_gone(world: World):
    has(world, 2)
    world.scale("collector", 1)
    for _ in range(2):
        world.release(("collector/0", 0))
        world.round()
    assert world.told == [("collector/0", 0)] and world.live() == [("collector/1", 0)]
    has(world, 2)
    assert world.live() == [("collector/1", 0), ("collector/2", 0)]
    world.round(GRACE + 1.0)
    assert world.killed == [("collector/0", 0)]
    has(world, 3)
    assert world.live() == [("collector/0", 1), ("collector/1", 0), ("collector/2", 0)]


@pytest.mark.parametrize("error", [OSError("no room"), RuntimeError("Ray is gone")])
def test_one_that_cannot_be_started_is_tried_again(world: World, error: Exception):
    world.start_error = error
    has(world, 1)
    assert world.problems() == [f"collector/0 could not be started: {type(error).__name__}: {error}."]
    assert world.live() == []
    world.start_error = None
    world.round(1.0)
    assert world.begun == [("collector/0", 0), ("collector/0", 1)] and world.live() == [("collector/0", 1)]


class Schedules(RuleBasedStateMachine):
    """Whatever happens, in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.wanted = 0
        self.allowed_to_end: set[Key] = set()

    def teardown(self) -> None:
        self.world.close()

    @rule(n=st.integers(0, 4))
    def request(self, n: int) -> None:
        self.world.scale("collector", n)
        self.wanted = n

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 200.0]))
    def round(self, seconds: float) -> None:
        self.world.round(seconds)

    @precondition(lambda self: self.world.begun)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.world.begun))
        self.allowed_to_end.add(key)
        self.world.replace(key)

    @precondition(lambda self: self.world.begun)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.world.begun))
        self.allowed_to_end.add(key)
        self.world.release(key)

    @precondition(lambda self: self.world.there)
    @rule(data=st.data(), code=st.sampled_from([0, 1, 4, -9]))
    def die(self, data: st.DataObject, code: int) -> None:
        self.world.there[data.draw(st.sampled_from(sorted(self.world.there)))].end(code)

    @rule(is_full=st.booleans())
    def fill(self, is_full: bool) -> None:
        self.world.start_error = OSError("no room") if is_full else None

    @rule()
    def settle(self) -> None:
        """Left alone, it comes to rest with as many as are wanted, or more where there were more."""
        self.world.start_error = None
        for _ in range(6):
            self.world.round(GRACE + 1.0)
        live = self.world.live()
        assert len(live) >= self.wanted
        assert sorted(self.world.there) == live  # and nothing else is there
        before = list(self.world.begun)
        self.world.round(GRACE)
        assert self.world.begun == before

    @invariant()
    def no_incarnation_is_started_twice_and_they_only_rise(self) -> None:
        for worker_id in {key[0] for key in self.world.begun}:
            incarnations = [key[1] for key in self.world.begun if key[0] == worker_id]
            assert incarnations == sorted(set(incarnations))

    @invariant()
    def no_worker_has_two_processes(self) -> None:
        ids = [key[0] for key in self.world.there]
        assert len(ids) == len(set(ids))

    @invariant()
    def only_those_are_ended_that_somebody_gave_up(self) -> None:
        assert set(self.world.killed + self.world.told) <= self.allowed_to_end


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
