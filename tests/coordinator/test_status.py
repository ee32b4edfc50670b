"""What a coordinator tells of its job."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest

from rlframe.coordinator import status as statuses
from rlframe.coordinator.commander import TrainOne
from rlframe.coordinator.control import endpoints
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.accounts import Rates
from rlframe.stop_conditions import StopReason
from tests.coordinator.core.simulation import Simulation

PAGE = pathlib.Path(statuses.__file__).parent / "control" / "page.html"
DESCRIBES = {"id": "a", "agent": "dqn", "env": "CartPole-v1", "run_dir": "/runs/a", "until": 100}


def test_rates_are_of_the_last_seconds() -> None:
    rates = Rates(2)
    assert rates.per_second(100.0) == (0.0, 0.0)
    rates.add(100.0, 1000, 10)
    assert rates.per_second(100.0) == (0.0, 0.0)
    rates.add(102.0, 1200, 14)
    assert rates.per_second(102.0) == (100.0, 2.0)
    rates.add(106.0, 1600, 14)
    assert rates.per_second(106.0) == (100.0, 0.0)  # of the 4 s that are less than 5 old
    assert rates.per_second(107.0) == (80.0, 0.0) and rates.per_second(111.5) == (0.0, 0.0)  # nothing came since
    rates.add(120.0, 9999, 99)
    assert rates.per_second(120.0) == (0.0, 0.0)


@pytest.fixture
def world() -> Simulation:
    world = Simulation(collectors=2, commander=TrainOne("mine", env_steps=10**9))
    assert world.run(60.0, lambda: world.m.accounts.learned > 3 and world.m.accounts.env_steps > 100)
    return world


def status(world: Simulation) -> dict[str, Any]:
    found = statuses.status(
        world.m,
        world.m.accounts.to_json(),
        run_info=DESCRIBES,
        limits={"collector": [1, 8]},
        operator={"kind": "LocalOperator", "problems": {}},
        replay={"items": 3},
        rates=Rates(2),
        now=world.now,
    )
    assert json.loads(json.dumps(found)) == found
    return found


def test_it_tells_of_job_workers_and_tasks(world: Simulation) -> None:
    found, job = status(world), status(world)["job"]
    assert {name: job[name] for name in DESCRIBES} == DESCRIBES
    assert (job["state"], job["policy_id"], job["reason"]) == ("RUNNING", "mine", "")
    assert job["env_steps"] == world.m.accounts.env_steps and job["learner_steps"] == world.m.accounts.learner_steps
    assert job["params_version"] == world.store.newest
    assert job["seconds"] == pytest.approx(world.now - 1000.0)
    assert (found["wanted"], found["scaling"]) == ({"learner": 1, "collector": 2, "evaluator": 0}, "auto")
    assert found["limits"] == {"collector": [1, 8]} and found["replay"] == {"items": 3}
    workers = {worker["worker_id"]: worker for worker in found["workers"]}
    assert list(workers) == ["learner/0", "collector/0", "collector/1"]
    steps = [worker.counts["env_steps"] for worker in world.live("collector")]
    told = [workers[f"collector/{index}"]["env_steps"] for index in (0, 1)]
    assert all(0 <= counted - said <= 10 for counted, said in zip(steps, told)) and min(told) > 0
    assert workers["collector/1"]["return_mean"] == 5.0 and workers["learner/0"]["return_mean"] is None
    assert workers["learner/0"]["task_id"] == "learn/1" and workers["learner/0"]["attempt"] == 0
    assert workers["learner/0"]["params_version"] == world.m.accounts.params_version
    assert [task["task_id"] for task in found["tasks"]] == ["learn/1", "collect/2", "collect/3"]
    assert {task["state"] for task in found["tasks"]} == {"RUNNING"}
    assert [task["overrides"] for task in found["tasks"]] == [{}, {}, {}]
    # In simulated time each collects 10 steps with a call, and is called some times per second.
    assert all(5 < workers[f"collector/{index}"]["env_steps_per_second"] < 200 for index in (0, 1))
    assert workers["learner/0"]["env_steps_per_second"] is None


def test_it_tells_what_the_learner_waits_for(world: Simulation) -> None:
    def waits() -> Any:
        return status(world)["job"]["waits_for"]

    world.m.learner.wait_for(None, world.now)
    assert waits() is None
    world.m.learner.wait_for("data", world.now)
    assert waits() == "data"
    for worker in world.m.roster.of("collector"):
        worker.progress.is_waiting = True
    assert waits() == "pacing"
    world.m.learner.wait_for("learner", world.now)
    assert waits() == "learner"
    world.deliver(ev.PauseRequested(True))
    assert waits() == "paused"
    world.deliver(ev.PauseRequested(False))
    world.deliver(ev.EvaluationRequested())
    assert waits() == "learner"  # it goes on beside an evaluation
    world.deliver(ev.EndRequested(StopReason("interrupt", "enough")))
    assert waits() == "evaluation"
    assert world.run(60.0, lambda: world.is_over) and waits() is None


def test_it_tells_of_an_evaluation_and_of_a_lost_worker(world: Simulation) -> None:
    world.deliver(ev.EvaluationRequested())
    assert world.run(60.0, lambda: bool(world.m.accounts.evaluations))
    version = world.m.accounts.evaluations[-1][2]
    job = status(world)["job"]
    assert (job["evaluated_version"], job["eval_return"]) == (version, float(version))
    assert status(world)["evaluations"] == world.m.accounts.evaluations
    world.kill(world.live("collector")[0])
    assert world.run(5.0, lambda: status(world)["job"]["restarts"] == 1)
    assert [w["state"] for w in status(world)["workers"] if w["worker_id"] == "collector/0"] == ["LOST"]


def test_it_tells_that_the_operator_is_away_and_that_a_person_scales(world: Simulation) -> None:
    assert status(world)["operator"] == {"kind": "LocalOperator", "problems": {}, "connected": True, "problem": ""}
    world.operator.is_out = True
    world.run(1.0)
    operator = status(world)["operator"]
    assert (operator["connected"], operator["problem"]) == (False, "it is away")
    world.deliver(ev.ScaleRequested("collector", 3))
    assert status(world)["scaling"] == "manual" and status(world)["wanted"]["collector"] == 3


def test_a_job_that_has_not_begun_has_a_status_as_well() -> None:
    world = Simulation()
    world.job = type(world.m)(world.commander, world.limits, {"learner": 1}, by_key=True, now=world.now)
    found = status(world)
    assert found["job"]["state"] == "INIT" and found["workers"] == [] and not found["operator"]["connected"]
    assert found["job"]["return_mean"] is None and found["job"]["evaluated_version"] is None


def test_what_the_page_and_prometheus_read_is_there(world: Simulation) -> None:
    found, page = status(world), PAGE.read_text()
    of_all = set(re.findall(r"\blive\??\.(\w+)", page))
    assert of_all and of_all - {"commands"} <= set(found)  # which a run without a coordinator has
    of_job = set(re.findall(r"\bjob\??\.(\w+)", page))
    assert {"state", "env_steps", "waits_for"} <= of_job <= {"unit", *found["job"]}
    gauges = {key for _, _, key in (*endpoints._GAUGES, *endpoints._COUNTERS)}
    assert gauges <= set(found["job"])
