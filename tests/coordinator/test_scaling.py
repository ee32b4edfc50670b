"""How many collectors a job has, of what windows of time look like."""

from __future__ import annotations

import numpy as np
import pytest

from rlframe.coordinator.commander import TrainOne
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.scaling import Load, Scaling
from tests.coordinator.core.simulation import Simulation


def window(
    collectors: int, *, waited: float = 0.0, steps: int = 1000, waiting_share: float = 0.0, **more: float
) -> Load:
    return Load(
        collectors, 10.0, learner_waiting_seconds=10.0 * waited, env_steps=steps, waiting_share=waiting_share, **more
    )


def after(scaling: Scaling, *windows: Load) -> list[int]:
    return [scaling.judge(each) for each in windows]


def test_a_learner_that_waits_for_data_gets_a_collector_more_as_far_as_there_are_cores():
    assert after(Scaling(1, 8, cores=2), window(1, waited=0.5)) == [2]
    assert after(Scaling(1, 8, cores=2), window(2, waited=0.5)) == [2]
    assert after(Scaling(1, 8, cores=2), window(1, waited=0.1)) == [1]


def test_collectors_that_wait_for_the_learner_are_too_many():
    assert after(Scaling(1, 8, cores=8), window(3, waiting_share=0.8)) == [2]
    assert after(Scaling(1, 8, cores=8), window(1, waiting_share=0.8)) == [1]
    assert after(Scaling(1, 8, cores=8, mean_staleness=2.0), window(3, staleness=3.0)) == [2]


def test_one_more_that_brings_steps_stays_though_the_learner_waits_nearly_as_long():
    scaling = Scaling(1, 3, cores=8)
    slow = [window(1, waited=0.98, steps=100), window(2, waited=0.98), window(2, waited=0.96, steps=200)]
    assert after(scaling, *slow) == [2, 2, 3]


def test_one_more_that_brings_nothing_goes_and_is_not_tried_again_at_once():
    scaling, busy = Scaling(1, 8, cores=8), window(1, waited=0.5)
    assert after(scaling, busy, window(2, waited=0.5), window(2, waited=0.5, steps=1050)) == [2, 2, 1]
    assert after(scaling, *[busy] * 5) == [1, 1, 1, 1, 2]


def test_the_patience_with_what_brings_nothing_doubles():
    scaling, busy = Scaling(1, 8, cores=8), window(1, waited=0.5)
    tries = [index for index, count in enumerate(after(scaling, *[busy] * 40)) if count == 2]
    assert list(np.diff(tries)) == [7, 11, 19]  # 4, 8 and 16 windows of patience, one to compile, two to see


def test_too_old_data_is_a_reason_for_fewer_even_where_the_learner_waits():
    scaling = Scaling(1, 8, cores=8, mean_staleness=2.0)
    assert after(scaling, window(3, waited=0.9, staleness=2.1)) == [2]
    assert after(Scaling(1, 8, cores=8, mean_staleness=2.0), window(3, waited=0.1, staleness=2.0)) == [3]
    assert after(Scaling(2, 8, cores=8, mean_staleness=2.0), window(2, staleness=9.0)) == [2]


def test_there_are_never_fewer_than_the_least_though_there_are_fewer_cores():
    assert after(Scaling(4, 8, cores=2), window(1, waited=0.5), window(4, waited=0.5)) == [4, 4]


class Judge(Scaling):
    """Writes down the windows that it is shown."""

    def __init__(self, says: int) -> None:
        super().__init__(1, 8, cores=8)
        self.says, self.seen = says, list[Load]()

    def judge(self, load: Load) -> int:
        self.seen.append(load)
        return self.says


@pytest.fixture
def world() -> Simulation:
    world = Simulation(collectors=2, commander=TrainOne(env_steps=10**9))
    assert world.run(60.0, lambda: world.m.accounts.learned > 3 and world.m.collectors.seconds > 0.5)
    return world


def look(world: Simulation, judge: Judge, seconds: float) -> int | None:
    world.run(seconds)
    return judge.wanted(world.m, world.now)


def test_a_window_is_judged_by_what_happened_in_it(world: Simulation):
    judge = Judge(3)
    assert judge.wanted(world.m, world.now) is None
    steps, waited, seconds = (
        world.m.accounts.env_steps,
        world.m.learner.seconds_without_data(world.now),
        world.m.collectors.seconds,
    )
    assert look(world, judge, 4.9) is None and judge.seen == []
    world.run(0.2)
    world.m.accounts.logs["staleness"] = 1.5
    world.m.collectors.seconds_waited += 5.0
    assert judge.wanted(world.m, world.now) == 3
    (load,) = judge.seen
    assert (load.collectors, load.staleness) == (2, 1.5) and load.seconds == pytest.approx(5.1)
    assert load.env_steps == world.m.accounts.env_steps - steps > 50
    assert load.learner_waiting_seconds == pytest.approx(world.m.learner.seconds_without_data(world.now) - waited)
    assert load.waiting_share == pytest.approx(5.0 / (world.m.collectors.seconds - seconds))
    judge.says = 2
    assert look(world, judge, 5.1) is None  # there are as many


def test_nothing_is_judged_once_a_person_has_said_how_many_there_are(world: Simulation):
    judge = Judge(3)
    world.deliver(ev.ScaleRequested("collector", 1))
    assert [look(world, judge, 6.0) for _ in range(4)] == [None] * 4 and judge.seen == []


def test_nothing_is_judged_while_the_job_stands_still_or_collectors_are_on_their_way(world: Simulation):
    judge = Judge(1)
    judge.wanted(world.m, world.now)
    world.deliver(ev.PauseRequested(True))
    assert [look(world, judge, 6.0) for _ in range(3)] == [None] * 3 and judge.seen == []
    world.deliver(ev.PauseRequested(False))
    assert look(world, judge, 3.0) is None and judge.seen == []  # the window began when it went on
    world.kill(world.live("collector")[1])
    world.operator.never_comes.add("collector")
    assert [look(world, judge, 6.0) for _ in range(2)] == [None] * 2 and judge.seen == []


def test_a_scaling_by_load_is_no_persons_word(world: Simulation):
    world.deliver(ev.ScaleRequested("collector", 3, "load"))
    assert world.m.requests.wanted["collector"] == 3 and not world.m.requests.count_is_manual
