"""The rules by which workers are started and ended, with a scripted world and no clock."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlframe.coordinator.messages import WorkerInfo
from rlframe.coordinator.operators.reconciler import Backoff, Reconciler

BACKOFF = Backoff(first=1.0, longest=4.0, healthy=100.0)
GRACE = 5.0


class World:
    """What a backend would do: starts at once, ends at once when killed, and in its own time when told."""

    def __init__(self, incarnations: dict[str, int] | None = None) -> None:
        self.reconciler = Reconciler(incarnations or {}, BACKOFF, GRACE)
        self.there: dict[tuple[str, int], WorkerInfo] = {}
        self.now = 0.0
        self.begun: list[tuple[str, int]] = []
        self.killed: list[tuple[str, int]] = []
        self.told: list[tuple[str, int]] = []

    def round(self, after: float = 0.0) -> None:
        self.now += after
        starts, stops = self.reconciler.plan(list(self.there.values()), self.now)
        for worker, kill in stops:
            (self.killed if kill else self.told).append(worker.key)
            if kill:
                self.there.pop(worker.key, None)
        for start in starts:
            self.begin(start)
            self.reconciler.started(start, self.now)

    def begin(self, start: WorkerInfo) -> None:
        self.there[start.key] = dataclasses.replace(start, address="host:1", host="host", pid=1)
        self.begun.append(start.key)

    def live(self) -> list[tuple[str, int]]:
        return sorted(key for key in self.there if self.reconciler.is_wanted(key))


def worlds_with(n: int) -> World:
    world = World()
    world.reconciler.request("collector", n)
    world.round()
    world.round()
    return world


def test_as_many_are_started_as_are_wanted_and_repeating_it_starts_no_more():
    world = worlds_with(2)
    world.reconciler.request("collector", 2)
    world.round()
    assert world.begun == [("collector/0", 0), ("collector/1", 0)] == world.live()


def test_nothing_is_started_of_a_role_that_nobody_asked_for():
    world = World({"learner/0": 4})
    world.round(1000.0)
    assert world.begun == [] and world.reconciler.incarnations() == {"learner/0": 4}


def test_one_that_dies_young_is_replaced_later_and_later_and_one_that_lived_long_at_once():
    world = worlds_with(1)
    delays = []
    for incarnation in range(5):
        del world.there["collector/0", incarnation]
        world.round()
        delays.append(world.reconciler.next_due() - world.now)
        world.round(delays[-1])
    assert delays == [1.0, 2.0, 4.0, 4.0, 4.0]
    assert world.live() == [("collector/0", 5)] and "5 times" in world.reconciler.problems()["collector/0"]
    world.round(100.0)
    assert world.reconciler.problems() == {}
    del world.there["collector/0", 5]
    world.round()
    assert world.live() == [("collector/0", 6)]


def test_a_report_kills_once_and_replaces_once():
    world = worlds_with(2)
    for _ in range(3):
        world.reconciler.report_failed(("collector/1", 0), world.now)
        world.round()
    world.round(1.0)
    world.reconciler.report_failed(("collector/1", 0), world.now)
    world.round()
    assert world.killed == [("collector/1", 0)]
    assert world.live() == [("collector/0", 0), ("collector/1", 1)]


def test_a_lower_request_ends_none_and_the_next_death_is_not_replaced():
    world = worlds_with(3)
    world.reconciler.request("collector", 2)
    world.round()
    assert len(world.live()) == 3
    del world.there["collector/0", 0]
    world.round(10.0)
    world.round(10.0)
    assert world.live() == [("collector/1", 0), ("collector/2", 0)]
    assert world.reconciler.next_due() is None and world.reconciler.problems() == {}


def test_a_released_one_is_told_then_killed_and_its_index_waits_until_it_is_gone():
    world = worlds_with(2)
    world.reconciler.request("collector", 1)
    world.reconciler.release(("collector/0", 0), world.now)
    world.round()
    assert world.told == [("collector/0", 0)] and world.live() == [("collector/1", 0)]
    world.reconciler.request("collector", 2)
    world.round()
    assert world.live() == [("collector/1", 0), ("collector/2", 0)]
    world.round(GRACE)
    assert world.killed == [("collector/0", 0)]
    world.reconciler.request("collector", 3)
    world.round()
    assert world.live() == [("collector/0", 1), ("collector/1", 0), ("collector/2", 0)]


def test_a_successor_adopts_what_lives_and_ends_an_incarnation_that_was_given_up():
    before = worlds_with(2)
    after = World(before.reconciler.incarnations() | {"collector/1": 1})  # it was about to replace that one
    after.there = dict(before.there)
    after.round()
    assert after.live() == [("collector/0", 0)] and after.killed == [("collector/1", 0)]
    after.reconciler.request("collector", 2)
    after.round()
    assert after.live() == [("collector/0", 0), ("collector/1", 2)]


def test_a_start_that_may_or_may_not_have_happened_does_not_happen_twice():
    world = World()
    world.reconciler.request("learner", 1)
    (start,), _ = world.reconciler.plan([], 0.0)
    world.reconciler.failed_to_start(start, 0.0, "no answer")
    assert world.reconciler.plan([], 0.5) == ([], [])
    assert world.reconciler.problems() == {"learner/0": "no answer"}
    assert world.reconciler.plan([], 1.0) == ([start], [])  # the same: a backend that has it already takes it so
    world.begin(start)  # the first call had been heard
    world.round(1.0)
    assert world.begun == [("learner/0", 0)] and world.live() == [("learner/0", 0)]


def test_one_that_was_started_unnoticed_and_is_dead_already_is_not_started_again_by_that_number():
    world = World()
    world.reconciler.request("learner", 1)
    (start,), _ = world.reconciler.plan([], 0.0)
    world.reconciler.failed_to_start(start, 0.0, "no answer")
    world.begin(start)
    key = ("learner/0", 0)
    world.there[key] = dataclasses.replace(world.there[key], has_ended=True, problem="out of memory")
    world.round(1.0)
    assert world.killed == [key] and "out of memory" in world.reconciler.problems()["learner/0"]
    world.round(4.0)
    assert world.live() == [("learner/0", 1)]


class Schedules(RuleBasedStateMachine):
    """Whatever happens, in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.wanted = 0
        self.allowed_to_end: set[tuple[str, int]] = set()

    @rule(n=st.integers(0, 4))
    def request(self, n: int) -> None:
        self.world.reconciler.request("collector", n)
        self.wanted = n

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 200.0]))
    def round(self, seconds: float) -> None:
        self.world.round(seconds)

    @precondition(lambda self: self.world.begun)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.world.begun))
        self.allowed_to_end.add(key)
        self.world.reconciler.report_failed(key, self.world.now)

    @precondition(lambda self: self.world.begun)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.world.begun))
        self.allowed_to_end.add(key)
        self.world.reconciler.release(key, self.world.now)

    @precondition(lambda self: self.world.there)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        del self.world.there[data.draw(st.sampled_from(sorted(self.world.there)))]

    @precondition(lambda self: self.world.there)
    @rule(data=st.data())
    def fail_visibly(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.world.there)))
        self.world.there[key] = dataclasses.replace(self.world.there[key], has_ended=True)
        self.allowed_to_end.add(key)

    @rule()
    def restart(self) -> None:
        before, self.world = self.world, World(self.world.reconciler.incarnations())
        self.world.there, self.world.now, self.world.begun = before.there, before.now, before.begun
        self.world.round()
        self.world.reconciler.request("collector", self.wanted)

    @rule()
    def settle(self) -> None:
        """Left alone, it comes to rest with as many as are wanted, or more where there were more."""
        for _ in range(6):
            self.world.round(GRACE)
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
    def one_incarnation_of_each_is_wanted_at_most(self) -> None:
        ids = [key[0] for key in self.world.live()]
        assert len(ids) == len(set(ids))

    @invariant()
    def only_those_are_ended_that_somebody_gave_up(self) -> None:
        assert set(self.world.killed + self.world.told) <= self.allowed_to_end


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
