"""Tests of the benchmarks of Reverb and IMPALA: their scripts run, and a program's speed limit is computed."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest

from benchmarks import impala_pong, reverb
from benchmarks.context import Context
from benchmarks.report import NotMeasured


class FakeContext(Context):
    """Return a context with known results: (script, arguments before the first option) -> result."""

    figures: dict[tuple[Any, ...], dict[str, float]]

    def ours(self, name: str, *arguments: Any, env: dict[str, str] | None = None) -> dict[str, Any]:
        options = [i for i, argument in enumerate(arguments) if str(argument).startswith("--")]
        ways = tuple(
            arguments[i + 1] for i in options if name == "impala" and arguments[i] in ("--processes", "--threads")
        )
        key = (name, *arguments[: options[0]], *ways)
        if key not in self.figures:
            raise NotMeasured("it failed")
        return self.figures[key]


def fake_context(figures: dict[tuple[Any, ...], dict[str, float]]) -> FakeContext:
    context = FakeContext(repeats=1, quick=True)
    object.__setattr__(context, "figures", figures)
    return context


def steps(value: float) -> dict[str, float]:
    return {"steps_per_second": value}


def impala(heavy: float, loop: float) -> dict[tuple[Any, ...], dict[str, float]]:
    parts = {"env": (3000.0, 4000.0), "inference": (2000.0, 1000.0), "learner": (900.0, 1000.0), "loop": (loop, 1.0)}
    measured = {("impala", "program", topology): steps(heavy) for topology in impala_pong.TOPOLOGIES}
    for part, values in parts.items():
        for way, value in zip(impala_pong.WAYS, values):
            measured[("impala", "part", part, *way)] = steps(value)
    return measured


def test_limit_is_computed_from_the_best_rate_of_each_part_run_in_sequence():
    heavy, light = impala_pong.run(fake_context(impala(heavy=400.0, loop=500.0)), lambda _: None)
    limit, loop, *parts = heavy.others
    assert [row.value for row in parts] == [4000.0, 2000.0, 1000.0]
    assert math.isclose(limit.value, 1 / (1 / 4000 + 1 / 2000 + 1 / 1000))
    assert loop.value == 500.0
    assert [row.note for row in parts] == ["one process", "2 processes", "one process"]
    assert heavy.missed_targets() == [
        "IMPALA on Pong-v5, Nature CNN, 2 actors, heavy_env: 0.70 times the limit: the better of "
        "parts and loop, target 0.8"
    ]
    assert light.title.endswith("light_env")


def test_limit_is_the_rate_of_the_bare_loop_if_the_loop_is_faster():
    heavy, _ = impala_pong.run(fake_context(impala(heavy=400.0, loop=600.0)), lambda _: None)
    assert heavy.others[0].value == 600.0


def test_parts_are_not_measured_if_only_rlframe_is_measured():
    context = fake_context({("impala", "program", "heavy_env"): {**steps(400.0), "processor_us": 4000.0}})
    object.__setattr__(context, "only_ours", True)
    heavy, light = impala_pong.run(context, lambda _: None)
    assert (heavy.ours.value, heavy.ours.processor) == (400.0, 4000.0)
    assert [row.value for row in heavy.others] == [None] * 5
    assert light.ours.note == "not measured: it failed"


def test_limit_is_the_rate_of_the_loop_if_a_part_is_missing():
    figures = impala(heavy=400.0, loop=600.0)
    for way in impala_pong.WAYS:
        del figures[("impala", "part", "learner", *way)]
    heavy, _ = impala_pong.run(fake_context(figures), lambda _: None)
    assert heavy.others[0].value == 600.0
    assert (heavy.others[-1].value, heavy.others[-1].note) == (None, "not measured: it failed")
    assert impala_pong.sequential_rate([4000.0, None]) is None


@pytest.mark.system
@pytest.mark.parametrize("way", ["ours", "blocks", "appends", "transitions"])
def test_every_insert_workload_of_reverb_runs(way):
    found = Context().ours("reverb", "insert", way, "--seconds", 0.1)
    assert set(found) == {"steps_per_second", "processor_us"} and min(found.values()) > 0


@pytest.mark.system
@pytest.mark.parametrize("workload", reverb.SAMPLES)
def test_every_sample_workload_of_reverb_runs(workload):
    found = Context().ours("reverb", "sample", workload, "--seconds", 0.1, "--items", 1280)
    assert set(found) == {"ours", "bare", "processor_us"} and min(found.values()) > 0


@pytest.mark.system
@pytest.mark.parametrize("part", ["env", "inference", "learner", "loop"])
def test_every_part_of_impala_runs_alone(part):
    found = Context().ours("impala", "part", part, "--processes", 2, "--threads", 1, "--seconds", 0.1)
    assert found["steps_per_second"] > 0


@pytest.mark.system
def test_program_is_measured_after_its_warm_up():
    found = Context().ours("impala", "program", "heavy_env", "--seconds", 2)
    # The learner uses every step once. An update uses 8 unrolls of 20 steps.
    assert found["updates_per_second"] * 160 == pytest.approx(found["steps_per_second"], rel=0.5)
    # On average, the program uses at least 0.1 and at most all cores.
    assert 0.1 < found["processor_us"] * 1e-6 * found["steps_per_second"] < 1.2 * len(os.sched_getaffinity(0))
