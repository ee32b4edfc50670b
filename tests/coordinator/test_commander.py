"""Tests of the default commander."""

from __future__ import annotations

from typing import Any

import pytest

from rlframe.coordinator.commander import TrainOne, View
from rlframe.coordinator.messages import StartTask
from rlframe.errors import UsageError
from rlframe.stop_conditions import StopReason


def view(**values: Any) -> View:
    return View(**{"env_steps": 0, "learner_steps": 0, "params_version": 0, "seconds": 0.0, **values})


def test_one_learner_and_all_collectors_get_tasks() -> None:
    commander = TrainOne("mine", env_steps=10)
    assert commander.task("learner", 0, view()) == StartTask("learn", "mine")
    assert commander.task("learner", 1, view()) is None
    assert [commander.task("collector", index, view()) for index in (0, 7)] == [StartTask("collect", "mine")] * 2
    assert commander.final_policy() == "mine"


@pytest.mark.parametrize(
    ("limits", "before", "reached", "why"),
    [
        ({"env_steps": 1000}, {"env_steps": 999}, {"env_steps": 1000}, "1,000 of 1,000 environment steps were taken"),
        ({"learner_steps": 50}, {"learner_steps": 49}, {"learner_steps": 53}, "53 of 50 updates were made"),
        ({"seconds": 20.0}, {"seconds": 19.9}, {"seconds": 20.0}, "20 of 20 s have passed"),
        (
            {"eval_return": 475.0},
            {"eval_return": 474.9},
            {"eval_return": 475.0},
            "an evaluation reached a return of 475 (limit: 475)",
        ),
    ],
)
def test_job_is_over_when_a_limit_is_reached(limits: Any, before: Any, reached: Any, why: str) -> None:
    commander = TrainOne(**limits)
    assert commander.stop(view()) is None and commander.stop(view(**before)) is None
    reason = commander.stop(view(**reached))
    assert reason is not None and reason.text == why


def test_first_reached_limit_is_the_reason() -> None:
    commander = TrainOne(env_steps=100, seconds=5.0)
    assert commander.stop(view(env_steps=99, seconds=5.5)) == StopReason("until_seconds", "6 of 5 s have passed")
    reason = StopReason("steps", "100 of 100 environment steps were taken")
    assert commander.stop(view(env_steps=100, seconds=1.0)) == reason


def test_return_limit_is_not_reached_without_an_evaluation() -> None:
    assert TrainOne(eval_return=-100.0).stop(view(env_steps=10**9)) is None


def test_evaluations_are_due_at_multiples_of_their_period() -> None:
    commander = TrainOne("mine", env_steps=10**6, eval_every=100)
    due = [(99, 0), (100, 0), (150, 100), (199, 150), (200, 150), (1000, 100)]
    found = [commander.evaluation(view(env_steps=steps, evaluated_at=at)) for steps, at in due]
    assert found == [None, "mine", None, None, "mine", "mine"]
    assert TrainOne(env_steps=10**6).evaluation(view(env_steps=10**5)) is None  # only the last version is evaluated


@pytest.mark.parametrize("name", ["env_steps", "learner_steps", "seconds"])
def test_limits_must_be_above_0(name: str) -> None:
    with pytest.raises(UsageError, match=f"TrainOne.{name} must be above 0, got 0"):
        TrainOne(**{name: 0})  # type: ignore[arg-type]


def test_missing_limit_and_negative_evaluation_period_are_refused() -> None:
    with pytest.raises(UsageError, match="TrainOne needs a limit: env_steps, learner_steps, seconds or eval_return"):
        TrainOne()
    with pytest.raises(UsageError, match="TrainOne.eval_every must be at least 0, got -1"):
        TrainOne(env_steps=1, eval_every=-1)
