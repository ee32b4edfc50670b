"""Tests of the worker that evaluates."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from rlframe.agents import DQN, DQNConfig
from rlframe.coordinator.messages import Closed, Evaluated, Failed, GetData, NotReady, Started, StartTask
from rlframe.coordinator.param_store import ParamStore
from rlframe.coordinator.workers.game_workers import EvaluatorWorker
from rlframe.errors import StoppedError
from rlframe.programs.options.make_experiment import make_experiment
from rlframe.programs.policies.evaluation import Evaluations
from tests.coordinator.workers.caller import Caller
from tests.coordinator.workers.test_collector_worker import cartpole_params
from tests.fakes import counting_agent
from tests.waiting import wait_until

POLICY = "main"


def always(action: int, params):
    """Return DQN parameters for which `action` is always the greedy action."""
    last_bias = np.eye(2, dtype=np.float32)[action]
    return jax.tree.map(lambda leaf: last_bias if leaf.shape == (2,) else np.zeros_like(leaf), params)


def evaluate(version: int) -> StartTask:
    return StartTask("evaluate", POLICY, {"params_version": version})


@pytest.fixture
def make():
    """Return a function that makes a worker, and returns a caller for its task."""
    workers = []

    def make(make_evaluator, agent, store):
        worker = EvaluatorWorker(make_evaluator, agent, store, "evaluator/0", 0, 0)
        workers.append(worker)
        return Caller(worker, "task")

    yield make
    for worker in workers:
        worker.close()


@pytest.fixture
def evaluator(make):
    """Return a function that calls an evaluator worker. The worker's store contains two versions of one policy."""
    store = ParamStore()
    params, agent = cartpole_params(DQN, DQNConfig())
    for version in (1, 2):
        store.put(POLICY, version, always(version - 1, params))
    described = make_experiment("dqn", eval_episodes=4, env_type="loop")
    return make(functools.partial(Evaluations, described), agent, store)


@pytest.fixture
def endless(make):
    """Return a caller of a worker whose evaluations run until they are stopped."""
    store = ParamStore()
    store.put(POLICY, 3, {"w": np.float32(0.5)})
    return make(Endless, counting_agent(), store)


def evaluated(call: Caller, version: int) -> Evaluated:
    assert call.until_done("start_task", evaluate(version)) == Started({"params_version": version})
    reply = call.until_done("get_data", GetData())
    assert call.until_done("close_task", False) == Closed({})
    call.attempt += 1
    return reply


def test_evaluation_uses_the_requested_version_and_is_reproducible(evaluator):
    first, second, again = (evaluated(evaluator, version) for version in (1, 2, 1))
    assert (first.params_version, second.params_version) == (1, 2)
    assert set(first.values) == {"return_mean", "return_std", "length_mean", "episodes"}
    assert first.values["episodes"] == 4 and first.values["return_mean"] == first.values["length_mean"] > 0
    assert again == first
    assert second.values != first.values


def test_next_evaluation_reuses_the_compiled_code(evaluator):
    evaluated(evaluator, 1)
    inferencer = evaluator.worker._evaluator._inferencer
    evaluated(evaluator, 2)
    assert evaluator.worker._evaluator._inferencer is inferencer
    assert inferencer.stats()["compilations"] == 1


def test_repeated_request_does_not_repeat_the_evaluation(evaluator):
    evaluator.until_done("start_task", evaluate(1))
    first = evaluator.until_done("get_data", GetData())
    evaluator.worker._evaluator.evaluate = None  # another call of `evaluate` would fail
    assert evaluator.until_done("get_data", GetData()) == first


def test_evaluation_of_a_missing_version_fails_permanently(evaluator):
    failed = evaluator.until_done("start_task", evaluate(7))
    assert (failed.error, failed.is_permanent) == ("VersionGoneError", True)
    assert failed.message.startswith(
        "Version 7 of policy 'main' is not in the param store, so it cannot be evaluated. Available versions: 1, 2."
    )


class Endless:
    """An evaluator that runs until it is stopped."""

    def __init__(self, agent, learner) -> None:
        self.steps, self.is_stopped = 0, False

    def evaluate(self):
        while not self.is_stopped:
            self.steps += 1
        raise StoppedError("stopped")

    def stop(self):
        self.is_stopped = True


def test_running_evaluation_makes_progress_and_can_be_closed(endless):
    call = endless
    call.until_done("start_task", evaluate(3))
    assert call.call_once("get_data", GetData()) == NotReady()
    before = call.worker._progress_marker()
    wait_until(lambda: call.worker._progress_marker() > before)
    assert call.until_done("close_task", False) == Closed({})
    call.attempt = 1  # the next attempt starts
    call.until_done("start_task", evaluate(3))
    assert call.call_once("get_data", GetData()) == NotReady()


def test_collect_task_is_refused(endless):
    failed = endless.until_done("start_task", StartTask("collect", POLICY))
    assert (
        isinstance(failed, Failed)
        and failed.message == "evaluator/0 cannot collect: all its tasks are of the kind evaluate."
    )
