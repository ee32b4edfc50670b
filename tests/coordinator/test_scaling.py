"""Tests of the automatic scaling of collectors."""

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


def test_collector_is_added_if_the_learner_waits_and_a_core_is_free():
    assert after(Scaling(1, 8, cores=2), window(1, waited=0.5)) == [2]
    assert after(Scaling(1, 8, cores=2), window(2, waited=0.5)) == [2]
    assert after(Scaling(1, 8, cores=2), window(1, waited=0.1)) == [1]


def test_collector_is_removed_if_collectors_wait_or_data_is_too_old():
    assert after(Scaling(1, 8, cores=8), window(3, waiting_share=0.8)) == [2]
    assert after(Scaling(1, 8, cores=8), window(1, waiting_share=0.8)) == [1]
    assert after(Scaling(1, 8, cores=8, mean_staleness=2.0), window(3, staleness=3.0)) == [2]


def test_added_collector_is_kept_if_it_adds_steps_although_the_learner_still_waits():
    scaling = Scaling(1, 3, cores=8)
    slow = [window(1, waited=0.98, steps=100), window(2, waited=0.98), window(2, waited=0.96, steps=200)]
    assert after(scaling, *slow) == [2, 2, 3]


def test_added_collector_that_does_not_help_is_removed():
    scaling, busy = Scaling(1, 8, cores=8), window(1, waited=0.5)
    assert after(scaling, busy, window(2, waited=0.5), window(2, waited=0.5, steps=1050)) == [2, 2, 1]
    assert after(scaling, *[busy] * 5) == [1, 1, 1, 1, 2]


def test_pause_doubles_after_each_collector_that_does_not_help():
    scaling, busy = Scaling(1, 8, cores=8), window(1, waited=0.5)
    tries = [index for index, count in enumerate(after(scaling, *[busy] * 40)) if count == 2]
    assert list(np.diff(tries)) == [7, 11, 19]  # pauses of 4, 8 and 16 windows, plus 3 windows per attempt


def test_collector_is_removed_if_data_is_too_old_even_if_the_learner_waits():
    scaling = Scaling(1, 8, cores=8, mean_staleness=2.0)
    assert after(scaling, window(3, waited=0.9, staleness=2.1)) == [2]
    assert after(Scaling(1, 8, cores=8, mean_staleness=2.0), window(3, waited=0.1, staleness=2.0)) == [3]
    assert after(Scaling(2, 8, cores=8, mean_staleness=2.0), window(2, staleness=9.0)) == [2]


def test_lower_bound_applies_even_with_fewer_cores():
    assert after(Scaling(4, 8, cores=2), window(1, waited=0.5), window(4, waited=0.5)) == [4, 4]


class RecordingScaling(Scaling):
    """A scaling rule that records the windows, and returns a fixed count."""

    def __init__(self, count: int) -> None:
        super().__init__(1, 8, cores=8)
        self.count, self.seen = count, list[Load]()

    def judge(self, load: Load) -> int:
        self.seen.append(load)
        return self.count


@pytest.fixture
def sim() -> Simulation:
    sim = Simulation(collectors=2, commander=TrainOne(env_steps=10**9))
    assert sim.run(60.0, lambda: sim.job.accounts.learned > 3 and sim.job.collectors.seconds > 0.5)
    return sim


def wanted_after(sim: Simulation, scaling: RecordingScaling, seconds: float) -> int | None:
    sim.run(seconds)
    return scaling.wanted(sim.job, sim.now)


def test_load_covers_exactly_one_window(sim: Simulation):
    scaling = RecordingScaling(3)
    assert scaling.wanted(sim.job, sim.now) is None
    steps, waited, seconds = (
        sim.job.accounts.env_steps,
        sim.job.learner.seconds_without_data(sim.now),
        sim.job.collectors.seconds,
    )
    assert wanted_after(sim, scaling, 4.9) is None and scaling.seen == []
    sim.run(0.2)
    sim.job.accounts.logs["staleness"] = 1.5
    sim.job.collectors.seconds_waited += 5.0
    assert scaling.wanted(sim.job, sim.now) == 3
    (load,) = scaling.seen
    assert (load.collectors, load.staleness) == (2, 1.5) and load.seconds == pytest.approx(5.1)
    assert load.env_steps == sim.job.accounts.env_steps - steps > 50
    assert load.learner_waiting_seconds == pytest.approx(sim.job.learner.seconds_without_data(sim.now) - waited)
    assert load.waiting_share == pytest.approx(5.0 / (sim.job.collectors.seconds - seconds))
    scaling.count = 2
    assert wanted_after(sim, scaling, 5.1) is None  # the rule returned the current number


def test_no_automatic_scaling_after_a_manual_request(sim: Simulation):
    scaling = RecordingScaling(3)
    sim.deliver(ev.ScaleRequested("collector", 1))
    assert [wanted_after(sim, scaling, 6.0) for _ in range(4)] == [None] * 4 and scaling.seen == []


def test_no_automatic_scaling_while_paused_or_while_collectors_start(sim: Simulation):
    scaling = RecordingScaling(1)
    scaling.wanted(sim.job, sim.now)
    sim.deliver(ev.PauseRequested(True))
    assert [wanted_after(sim, scaling, 6.0) for _ in range(3)] == [None] * 3 and scaling.seen == []
    sim.deliver(ev.PauseRequested(False))
    assert wanted_after(sim, scaling, 3.0) is None and scaling.seen == []  # the window started after the pause
    sim.kill(sim.live("collector")[1])
    sim.operator.never_comes.add("collector")
    assert [wanted_after(sim, scaling, 6.0) for _ in range(2)] == [None] * 2 and scaling.seen == []


def test_automatic_scaling_does_not_count_as_manual(sim: Simulation):
    sim.deliver(ev.ScaleRequested("collector", 3, "load"))
    assert sim.job.requests.wanted["collector"] == 3 and not sim.job.requests.count_is_manual
