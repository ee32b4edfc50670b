"""How many collectors a job has, of what windows of time look like."""

from __future__ import annotations

from rlframe.coordinator.scaling import Load, Scaling


def window(collectors: int, *, waited: float = 0.0, steps: int = 1000, paced: float = 0.0, **more: float) -> Load:
    return Load(collectors, 10.0, learner_waited=10.0 * waited, env_steps=steps, paced=paced, **more)


def after(scaling: Scaling, *windows: Load) -> list[int]:
    return [scaling.wanted(each) for each in windows]


def test_a_learner_that_waits_for_data_gets_a_collector_more_as_far_as_there_are_cores():
    assert after(Scaling(1, 8, cores=2), window(1, waited=0.5)) == [2]
    assert after(Scaling(1, 8, cores=2), window(2, waited=0.5)) == [2]
    assert after(Scaling(1, 8, cores=2), window(1, waited=0.1)) == [1]


def test_collectors_that_wait_for_the_learner_are_too_many():
    assert after(Scaling(1, 8, cores=8), window(3, paced=0.8)) == [2]
    assert after(Scaling(1, 8, cores=8), window(1, paced=0.8)) == [1]
    assert after(Scaling(1, 8, cores=8, max_staleness=2.0), window(3, staleness=3.0)) == [2]


def test_one_more_that_brings_steps_stays_though_the_learner_waits_nearly_as_long():
    scaling = Scaling(1, 3, cores=8)
    slow = [window(1, waited=0.98, steps=100), window(2, waited=0.98), window(2, waited=0.96, steps=200)]
    assert after(scaling, *slow) == [2, 2, 3]


def test_one_more_that_brings_nothing_goes_and_is_not_tried_again_at_once():
    scaling, busy = Scaling(1, 8, cores=8), window(1, waited=0.5)
    assert after(scaling, busy, window(2, waited=0.5), window(2, waited=0.5, steps=1050)) == [2, 2, 1]
    assert after(scaling, *[busy] * 5) == [1, 1, 1, 1, 2]
