"""The throughput model in benchmarks/notes/scaling.md agrees with simulations with different limits."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.scaling import Costs, Program, draw, limits, long_enough, model, simulate

SMALL = Program(actors=1, batch=16, env_seconds=200e-6)


@pytest.mark.parametrize(
    ("program", "bound_by"),
    [
        (dataclasses.replace(SMALL, actors=4), "actors"),
        (dataclasses.replace(SMALL, actors=200), "learner"),
        (dataclasses.replace(SMALL, actors=200, costs=Costs(insert_step=20e-6)), "shards"),
        (dataclasses.replace(SMALL, actors=200, costs=Costs(insert_step=20e-6), shards=3), "shards"),
        (dataclasses.replace(SMALL, actors=200, step_bytes=1e5, bandwidth=1e9, costs=Costs(byte=0.0)), "draws"),
        (dataclasses.replace(SMALL, actors=40, service=True, rows=64, costs=Costs(batch_row=20e-6)), "inference"),
        (dataclasses.replace(SMALL, actors=2, env_seconds=0.0, cores=2), "cores"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_model_agrees_with_the_simulation(program, bound_by):
    expected = model(program)
    assert expected.bound_by == bound_by
    seen = simulate(program, long_enough(program))
    assert seen.steps == pytest.approx(expected.steps, rel=0.1)
    if bound_by != "cores":  # the model does not include waiting for a core
        assert seen.staleness == pytest.approx(expected.staleness, rel=0.15, abs=1.5)


def test_simulation_is_slightly_below_the_model_if_actors_and_learner_are_equally_fast():
    alone = limits(SMALL)
    knee = round(alone["learner"] / alone["actors"])
    seen = simulate(dataclasses.replace(SMALL, actors=knee), 0.3).steps
    assert 0.8 * alone["learner"] < seen < alone["learner"]


def test_number_of_actors_that_saturates_the_program_depends_on_the_costs():
    def knee(**changes):
        found = limits(dataclasses.replace(SMALL, **changes))
        return min(found[name] for name in found if name != "actors") / found["actors"]

    assert knee(batch=64) > knee()  # with a larger batch, the fixed cost of an update is shared by more steps
    assert knee(env_seconds=1e-3) > 3 * knee()
    assert knee(costs=Costs(insert_step=20e-6), shards=2) == pytest.approx(2 * knee(costs=Costs(insert_step=20e-6)))


def test_picture_is_drawn(tmp_path):
    points = [(program, model(program)) for program in (SMALL, dataclasses.replace(SMALL, actors=10))]
    draw({"small": points}, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
