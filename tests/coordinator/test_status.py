"""Tests of the status of a job."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest

from rlframe.control import endpoints
from rlframe.coordinator import status as statuses
from rlframe.coordinator.commander import TrainOne
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.core.records import Rates
from rlframe.stop_conditions import StopReason
from tests.coordinator.core.simulation import Simulation

PAGE = pathlib.Path(endpoints.__file__).with_name("page.html")
DESCRIBES = {"id": "a", "agent": "dqn", "env": "CartPole-v1", "run_dir": "/runs/a", "until": 100}


def test_rates_cover_the_last_seconds() -> None:
    rates = Rates(2)
    assert rates.per_second(100.0) == (0.0, 0.0)
    rates.add(100.0, 1000, 10)
    assert rates.per_second(100.0) == (0.0, 0.0)
    rates.add(102.0, 1200, 14)
    assert rates.per_second(102.0) == (100.0, 2.0)
    rates.add(106.0, 1600, 14)
    assert rates.per_second(106.0) == (100.0, 0.0)  # rate of the last 4 s, because the first record is older than 5 s
    assert rates.per_second(107.0) == (80.0, 0.0) and rates.per_second(111.5) == (0.0, 0.0)  # no new records
    rates.add(120.0, 9999, 99)
    assert rates.per_second(120.0) == (0.0, 0.0)


@pytest.fixture
def sim() -> Simulation:
    sim = Simulation(collectors=2, commander=TrainOne("mine", env_steps=10**9))
    assert sim.run(60.0, lambda: sim.job.accounts.learned > 3 and sim.job.accounts.env_steps > 100)
    return sim


def status(sim: Simulation) -> dict[str, Any]:
    found = statuses.status(
        sim.job,
        sim.job.accounts.to_json(),
        run_info=DESCRIBES,
        limits={"collector": [1, 8]},
        operator={"kind": "LocalOperator", "problems": {}},
        replay={"items": 3},
        rates=Rates(2),
        now=sim.now,
    )
    assert json.loads(json.dumps(found)) == found
    return found


def test_status_describes_job_workers_and_tasks(sim: Simulation) -> None:
    found, job = status(sim), status(sim)["job"]
    assert {name: job[name] for name in DESCRIBES} == DESCRIBES
    assert (job["state"], job["policy_id"], job["reason"]) == ("RUNNING", "mine", "")
    assert job["env_steps"] == sim.job.accounts.env_steps and job["learner_steps"] == sim.job.accounts.learner_steps
    assert job["params_version"] == sim.store.newest
    assert job["seconds"] == pytest.approx(sim.now - 1000.0)
    assert (found["wanted"], found["scaling"]) == ({"learner": 1, "collector": 2, "evaluator": 0}, "auto")
    assert found["limits"] == {"collector": [1, 8]} and found["replay"] == {"items": 3}
    workers = {worker["worker_id"]: worker for worker in found["workers"]}
    assert list(workers) == ["learner/0", "collector/0", "collector/1"]
    steps = [worker.counts["env_steps"] for worker in sim.live("collector")]
    told = [workers[f"collector/{index}"]["env_steps"] for index in (0, 1)]
    assert all(0 <= counted - said <= 10 for counted, said in zip(steps, told)) and min(told) > 0
    assert workers["collector/1"]["return_mean"] == 5.0 and workers["learner/0"]["return_mean"] is None
    assert workers["learner/0"]["task_id"] == "learn/1" and workers["learner/0"]["attempt"] == 0
    assert workers["learner/0"]["params_version"] == sim.job.accounts.params_version
    assert [task["task_id"] for task in found["tasks"]] == ["learn/1", "collect/2", "collect/3"]
    assert {task["state"] for task in found["tasks"]} == {"RUNNING"}
    assert [task["overrides"] for task in found["tasks"]] == [{}, {}, {}]
    # In the simulation, each call of a collector takes 10 steps, and there are several calls per second.
    assert all(5 < workers[f"collector/{index}"]["env_steps_per_second"] < 200 for index in (0, 1))
    assert workers["learner/0"]["env_steps_per_second"] is None


def test_status_shows_the_reason_for_waiting(sim: Simulation) -> None:
    def waits() -> Any:
        return status(sim)["job"]["waits_for"]

    sim.job.learner.wait_for(None, sim.now)
    assert waits() is None
    sim.job.learner.wait_for("data", sim.now)
    assert waits() == "data"
    for worker in sim.job.roster.of("collector"):
        worker.progress.is_waiting = True
    assert waits() == "pacing"
    sim.job.learner.wait_for("learner", sim.now)
    assert waits() == "learner"
    sim.deliver(ev.PauseRequested(True))
    assert waits() == "paused"
    sim.deliver(ev.PauseRequested(False))
    sim.deliver(ev.EvaluationRequested())
    assert waits() == "learner"  # an evaluation does not stop the training
    sim.deliver(ev.EndRequested(StopReason("interrupt", "enough")))
    assert waits() == "evaluation"
    assert sim.run(60.0, lambda: sim.is_over) and waits() is None


def test_status_shows_evaluations_and_lost_workers(sim: Simulation) -> None:
    sim.deliver(ev.EvaluationRequested())
    assert sim.run(60.0, lambda: bool(sim.job.accounts.evaluations))
    version = sim.job.accounts.evaluations[-1][2]
    job = status(sim)["job"]
    assert (job["evaluated_version"], job["eval_return"]) == (version, float(version))
    assert status(sim)["evaluations"] == sim.job.accounts.evaluations
    sim.kill(sim.live("collector")[0])
    assert sim.run(5.0, lambda: status(sim)["job"]["restarts"] == 1)
    assert [w["state"] for w in status(sim)["workers"] if w["worker_id"] == "collector/0"] == ["LOST"]


def test_status_shows_an_operator_outage_and_manual_scaling(sim: Simulation) -> None:
    assert status(sim)["operator"] == {"kind": "LocalOperator", "problems": {}, "connected": True, "problem": ""}
    sim.operator.is_out = True
    sim.run(1.0)
    operator = status(sim)["operator"]
    assert (operator["connected"], operator["problem"]) == (False, "it is away")
    sim.deliver(ev.ScaleRequested("collector", 3))
    assert status(sim)["scaling"] == "manual" and status(sim)["wanted"]["collector"] == 3


def test_job_that_has_not_started_has_a_status() -> None:
    sim = Simulation()
    sim.maybe_job = type(sim.job)(sim.commander, sim.limits, {"learner": 1}, by_key=True, now=sim.now)
    found = status(sim)
    assert found["job"]["state"] == "INIT" and found["workers"] == [] and not found["operator"]["connected"]
    assert found["job"]["return_mean"] is None and found["job"]["evaluated_version"] is None


def test_status_has_all_keys_of_the_page_and_the_metrics(sim: Simulation) -> None:
    found, page = status(sim), PAGE.read_text()
    of_all = set(re.findall(r"\blive\??\.(\w+)", page))
    assert of_all and of_all - {"commands"} <= set(found)  # only runs without a coordinator have `commands`
    of_job = set(re.findall(r"\bjob\??\.(\w+)", page))
    assert {"state", "env_steps", "waits_for"} <= of_job <= {"unit", *found["job"]}
    gauges = {key for _, _, key in (*endpoints._GAUGES, *endpoints._COUNTERS)}
    assert gauges <= set(found["job"])
