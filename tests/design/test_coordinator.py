"""Check that the coordinator matches its design document: its names, its states and its sequence of calls.

The coordinator, its threads and its journal are real. The workers and the operator are simulated in this process.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from rlframe.coordinator import Coordinator, CoordinatorConfig, ParamStore, TrainOne
from rlframe.coordinator.config import Limits
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.messages import (
    Closed,
    Collected,
    Demand,
    Evaluated,
    Header,
    Learn,
    Learned,
    Started,
    StartTask,
    WorkerKey,
)
from rlframe.coordinator.states import TRANSITIONS, JobState, TaskState, WorkerState
from rlframe.coordinator.workers.game_workers import CollectorWorker, EvaluatorWorker
from rlframe.coordinator.workers.learner_worker import LearnerWorker
from tests.coordinator.fakes import FakeCluster
from tests.waiting import wait_until

LEARNER, COLLECTOR, EVALUATOR = "learner/0", "collector/0", "evaluator/0"
CONFIGS = {"learner": {"policy": {"learning_rate": 0.5}, "learner": {"seed": 7}}, "collector": {"env": {"level": 2}}}


class Configured(TrainOne):
    """A commander that adds config overrides to the tasks of the learner and the collector."""

    def task(self, role: Any, index: int, view: Any) -> StartTask | None:
        start = super().task(role, index, view)
        return start and dataclasses.replace(start, overrides=CONFIGS[role])


class Traced(Coordinator):
    """A coordinator that records its actions in order. The actions are the arrows in the document's diagram."""

    def __init__(self, *args: Any) -> None:
        self.actions: list[Any] = []
        super().__init__(*args)
        self._carry_out = {kind: self._noting(act) for kind, act in self._carry_out.items()}

    def _noting(self, act: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noted(effect: Any) -> None:
            self.actions.append(effect)
            act(effect)

        return noted


@pytest.fixture(scope="module")
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture(scope="module")
def job(cluster: FakeCluster, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """Run a job to its end, and return the coordinator with its recorded actions."""
    path = tmp_path_factory.mktemp("job")
    made = Traced(
        Configured(learner_steps=30), cluster.operator, cluster.replay, cluster.store, CoordinatorConfig(str(path))
    )
    made.submit()
    wait_until(lambda: made.wait(1.0), "the end")
    made.close()
    return made


def calls(job: Traced, worker_id: str) -> list[ev.Send]:
    """Return the coordinator's calls for a worker's task, without repeated calls."""
    sends = [one for one in job.actions if isinstance(one, ev.Send) and one.key[0] == worker_id and one.header]
    return [next(same) for _, same in itertools.groupby(sends, key=lambda send: send.header)]


def replies(cluster: FakeCluster, worker_id: str, method: str) -> list[Any]:
    return [called.reply for called in cluster.trace if (called.worker_id, called.method) == (worker_id, method)]


def index_of(job: Traced, kind: type, key: WorkerKey | None = None, method: str = "") -> int:
    """Return the index of the coordinator's first action that has this kind, worker and method."""
    wanted = {name: value for name, value in (("key", key), ("method", method)) if value}
    return next(
        number
        for number, effect in enumerate(job.actions)
        if isinstance(effect, kind) and all(getattr(effect, name) == value for name, value in wanted.items())
    )


# --- sequence of calls: start, learn, collect and evaluate, close


def test_start_follows_the_document(job: Traced, cluster: FakeCluster) -> None:
    assert set(cluster.operator.made[:2]) == {(LEARNER, 0), (COLLECTOR, 0)}
    asked = index_of(job, ev.ScaleRole)
    for worker_id in (LEARNER, COLLECTOR):
        connected = index_of(job, ev.Connect, (worker_id, 0))
        started = index_of(job, ev.Send, (worker_id, 0), "start_task")
        assert asked < connected < started


def test_learning_follows_the_document(job: Traced, cluster: FakeCluster) -> None:
    start, *loop, close = calls(job, LEARNER)
    # The document says: "request learner start task (policy config, learner config), return learner start info".
    assert (start.method, start.args[0].kind, start.args[0].policy_id) == ("start_task", "learn", "main")
    assert start.args[0].overrides == {"policy": {"learning_rate": 0.5}, "learner": {"seed": 7}}
    assert isinstance(replies(cluster, LEARNER, "start_task")[0], Started)
    # The document says: "request data demand task, return data demand".
    # Then it says: "request learn task and send data (path, priority), return learn info".
    methods = [call.method for call in loop]
    assert set(methods) == {"data_demand", "learn"} and methods[0] == "data_demand"
    assert all(before == "data_demand" for before, after in itertools.pairwise(methods) if after == "learn")
    assert {type(reply) for reply in replies(cluster, LEARNER, "data_demand")} == {Demand}
    for call in loop:
        if call.method == "learn":
            (learn,) = call.args
            assert isinstance(learn, Learn) and learn.batches is not None
            assert all(batch.keys.shape == (1, 3) and batch.probabilities.shape == (1,) for batch in learn.batches)
    learned = replies(cluster, LEARNER, "learn")
    assert all(isinstance(reply, Learned) for reply in learned)
    names = {field.name for field in dataclasses.fields(Learned)}
    assert {"params_version", "logs", "updates"} <= names  # "policy meta" and "train stat" in the document
    # The document says: "Learner -> Middleware: send policy info". Each reply contains a newer policy version.
    versions = [reply.params_version for reply in learned]
    assert versions == sorted(set(versions)) and set(versions) <= set(cluster.store.versions)
    # The document says: "request learner close task, return learner close info: save final policy".
    assert (close.method, close.args) == ("close_task", (True,))
    assert isinstance(replies(cluster, LEARNER, "close_task")[0], Closed)
    assert cluster.saved == cluster.store.versions[-1]


def test_collecting_and_evaluation_follow_the_document(job: Traced, cluster: FakeCluster) -> None:
    start, *loop, close = calls(job, COLLECTOR)
    # The document says: "request collector start task (policy meta, env config, collector config)".
    assert (start.method, start.args[0].kind, start.args[0].policy_id) == ("start_task", "collect", "main")
    assert start.args[0].overrides == {"env": {"level": 2}}
    # The document says: "request get data task, Collector -> Middleware: send data, return data (metadata: length)".
    assert {call.method for call in loop} == {"get_data"}
    data = replies(cluster, COLLECTOR, "get_data")
    assert all(isinstance(reply, Collected) and reply.length == 1 for reply in data)
    assert cluster.replay.writers == [COLLECTOR] * len(data)
    # The document says: "return collector close info (episode result, collector performance)".
    assert close.method == "close_task"
    (closed,) = replies(cluster, COLLECTOR, "close_task")
    assert {"episodes", "return_sum", "env_steps"} <= set(closed.result)
    assert job.status()["job"]["env_steps"] == closed.result["env_steps"]
    # An evaluator receives the same calls as a collector. It evaluates one policy version and writes no data to replay.
    assert [call.method for call in calls(job, EVALUATOR)] == ["start_task", "get_data", "close_task"]
    (evaluated,) = replies(cluster, EVALUATOR, "get_data")
    assert isinstance(evaluated, Evaluated) and evaluated.params_version == cluster.store.versions[-1]


def test_closing_follows_the_document(job: Traced, cluster: FakeCluster) -> None:
    tasks = index_of(job, ev.Send, method="close_task")
    left = index_of(job, ev.EndWorkers)
    over = index_of(job, ev.Over)
    # The document says: "destroy connection of the learner", then "of the collector", "disconnect operator", "close".
    shut = [effect.key[0] for effect in job.actions[tasks:left] if isinstance(effect, ev.Disconnect)]
    assert shut == [LEARNER, COLLECTOR, EVALUATOR]
    assert not [effect for effect in job.actions[left:] if isinstance(effect, (ev.Connect, ev.Disconnect, ev.Send))]
    assert tasks < left < over
    assert not cluster.operator.workers and cluster.operator.disconnects == 1


def test_coordinator_receives_only_metadata(job: Traced, cluster: FakeCluster) -> None:
    for called in cluster.trace:
        for field in dataclasses.fields(called.reply):
            assert field.name not in ("params", "steps", "data", "observation")
    assert {field.name for field in dataclasses.fields(Header)} == {
        "task_id",
        "attempt",
        "worker_id",
        "incarnation",
        "seq",
    }


# --- states


def test_job_has_the_sequence_of_states_in_the_design_document(job: Traced) -> None:
    changes = [(event["before"], event["after"]) for event in job.events() if event["kind"] == "job"]
    states = ["INIT", "CONNECTING", "WAITING", "RUNNING", "DRAINING", "CLOSED"]
    assert changes == list(itertools.pairwise(states))
    assert {task["state"] for task in job.status()["tasks"]} == {"SUCCEEDED"}
    assert {worker["state"] for worker in job.status()["workers"]} == {"GONE"}


@pytest.mark.parametrize(
    ("kind", "paths"),
    [
        (
            JobState,
            [
                "INIT CONNECTING WAITING RUNNING DEGRADED RUNNING PAUSED RUNNING DRAINING CLOSED",
                "RUNNING DRAINING FAILED",
            ],
        ),
        (
            TaskState,
            [
                "PENDING ASSIGNED RUNNING CLOSING SUCCEEDED",
                "CLOSING FAILED",
                "CLOSING CANCELLED",
                "RUNNING RETRYING PENDING",
            ],
        ),
        (
            WorkerState,
            ["REQUESTED CONNECTING IDLE BUSY CLOSING IDLE", "BUSY SUSPECT BUSY", "SUSPECT LOST", "BUSY DRAINING GONE"],
        ),
    ],
)
def test_states_match_the_document(kind: Any, paths: list[str]) -> None:
    names = {name for path in paths for name in path.split()}
    assert {state.name for state in kind} == names
    for path in paths:
        for before, after in itertools.pairwise(path.split()):
            assert kind[after] in TRANSITIONS[kind[before]]
    last = {state.name for state in kind if not TRANSITIONS[state]}
    assert last == names & {"CLOSED", "FAILED", "SUCCEEDED", "CANCELLED", "LOST", "GONE"}  # terminal states


# --- names


@pytest.mark.parametrize(
    ("cls", "methods"),
    [
        (
            Coordinator,
            "submit cancel pause unpause scale evaluate_now status events checkpoint restore wait close",
        ),
        (LearnerWorker, "ping resources start_task data_demand learn close_task"),
        (CollectorWorker, "ping resources start_task get_data close_task"),
        (EvaluatorWorker, "ping resources start_task get_data close_task"),
    ],
)
def test_method_names_match_the_document(cls: type, methods: str) -> None:
    for name in methods.split():
        assert callable(getattr(cls, name)), name


def test_arguments_match_the_document() -> None:
    def arguments(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert arguments(Coordinator)[:5] == ["commander", "operator", "replay", "param_store", "cfg"]
    assert arguments(Coordinator.scale) == ["self", "role", "n"]
    assert arguments(Coordinator.events)[:2] == ["self", "since"]
    assert arguments(ParamStore.put)[:5] == ["self", "policy_id", "version", "params", "hparams"]
    assert arguments(ParamStore.get)[:3] == ["self", "policy_id", "min_version"]


def test_deadlines_match_the_document() -> None:
    limits = Limits()
    assert (limits.ping_every, limits.suspect_after, limits.lost_after) == (3.0, 9.0, 17.0)
    assert limits.lost_after_starting > limits.lost_after


def test_finished_job_stays_finished(job: Traced) -> None:
    path = pathlib.Path(job._cfg.path)
    status = (path / "status.json").read_text()
    job.cancel("too late")
    assert job.wait(0.0) and job.status()["job"]["state"] == "CLOSED" and (path / "status.json").read_text() == status
