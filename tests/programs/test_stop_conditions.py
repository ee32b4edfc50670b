"""Limits such as `until_return` end a run before its last step, in every topology."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

import rlframe
from rlframe.errors import UsageError
from rlframe.learners import Checkpointer
from rlframe.programs.options.make_experiment import make_experiment
from rlframe.programs.run_dir.directory import Result
from rlframe.programs.session import EarlyStop, Session
from rlframe.stop_conditions import StopConditions
from tests.programs.training.test_callbacks import NEVER, PLACES, PROCESSES, train


def check(run_dir: pathlib.Path, place: tuple[str, Any], limit: dict[str, Any]) -> Result:
    ((name, _),) = limit.items()
    result = train(run_dir, *place, eval_every=300, **limit)
    assert result.stopped_by == name and result.env_steps < NEVER
    assert result.return_mean == rlframe.evaluate(run_dir, episodes=2)["return_mean"]
    return result


@pytest.mark.parametrize(
    "place",
    [PLACES[0], *(pytest.param(place, marks=pytest.mark.system) for place in (PLACES[1], ("light_env", "threads")))],
)
def test_run_ends_when_an_evaluation_reaches_until_return(tmp_path, place):
    check(tmp_path / "run", place, {"until_return": 5.0})


@pytest.mark.parametrize("place", [PLACES[0], pytest.param(PLACES[1], marks=pytest.mark.system)])
def test_run_ends_at_exactly_until_learner_steps(tmp_path, place):
    result = check(tmp_path / "run", place, {"until_learner_steps": 7})
    assert result.learner_steps == 7 == Checkpointer(tmp_path / "run/checkpoints").steps()[-1]
    more = rlframe.train(run_dir=tmp_path / "run", resume=True, until_learner_steps=9, quiet=True)
    assert (more.learner_steps, more.stopped_by) == (9, "until_learner_steps")


@pytest.mark.system
@pytest.mark.parametrize("place", [PLACES[0], pytest.param(PLACES[1], marks=pytest.mark.system)])
def test_run_ends_after_until_seconds(tmp_path, place):
    result = check(tmp_path / "run", place, {"until_seconds": 1.0})
    assert result.wall_seconds >= 1.0


@pytest.mark.system
@pytest.mark.parametrize("limit", [{"until_return": 5.0}, {"until_learner_steps": 20}, {"until_seconds": 25.0}])
@pytest.mark.parametrize("place", PROCESSES)
def test_each_limit_ends_a_run_in_every_topology_and_engine(tmp_path, place, limit):
    result = check(tmp_path / "run", place, limit)
    if "until_learner_steps" in limit:
        assert result.learner_steps == 20


@pytest.mark.system
@pytest.mark.parametrize("place", [PLACES[0], pytest.param(PLACES[1], marks=pytest.mark.system)])
def test_result_of_a_run_that_reaches_its_last_step_has_the_reason_steps(tmp_path, place):
    run_dir = tmp_path / "run"
    assert train(run_dir, *place, steps=600, stop_at=300, until_learner_steps=NEVER).stopped_by == "stop_at"
    result = rlframe.train(run_dir=run_dir, resume=True, quiet=True)
    assert result.stopped_by == "steps" and result.to_json()["stopped_by"] == "steps"


@pytest.mark.parametrize("topology", ["single_process", "heavy_env", "elastic"])
def test_invalid_limits_are_refused(topology):
    for name, value in (("until_seconds", 0.0), ("until_learner_steps", -1), ("until_seconds", float("nan"))):
        with pytest.raises(UsageError, match=f"{name} must be above 0, got {value}"):
            rlframe.train("dqn", topology=topology, **{name: value})
    with pytest.raises(UsageError, match="until_return needs evaluations during the run. Set eval_every"):
        rlframe.train("dqn", topology=topology, until_return=100.0, eval_every=0)
    with pytest.raises(UsageError, match="until_return must be a number, got nan"):
        rlframe.train("dqn", topology=topology, until_return=float("nan"), eval_every=100)


def test_stop_conditions_report_which_limit_is_reached():
    limits = StopConditions(env_steps=100, learner_steps=10, seconds=5.0, eval_return=475.0)
    assert limits.reached(env_steps=99, learner_steps=9, seconds=4.9, eval_return=474.0) is None
    assert limits.reached() is None
    for name, reached in {
        "steps": {"env_steps": 100, "learner_steps": 10},
        "until_learner_steps": {"learner_steps": 10, "seconds": 9.0},
        "until_seconds": {"seconds": 5.0},
        "until_return": {"eval_return": 475.0},
    }.items():
        reason = limits.reached(**reached)
        assert reason is not None and reason.by == name and reason.text
    assert not StopConditions().has_limits and limits.has_limits


def test_request_of_another_thread_during_a_check_of_the_limits_is_kept(tmp_path, monkeypatch):
    experiment = make_experiment("dqn", "CartPole-v1", until_learner_steps=9)
    stop = EarlyStop(Session(experiment, None, tmp_path, 1, 0.0))
    monkeypatch.setattr(StopConditions, "reached", lambda *_, **__: stop.request("callback"))
    assert stop.check_limits(1, None) == "callback"
