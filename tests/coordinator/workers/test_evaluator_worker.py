"""The worker that evaluates: of which version, and how its evaluations repeat and end."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from rlframe.agents import DQN, DQNConfig
from rlframe.coordinator.messages import Closed, Evaluated, Failed, GetData, NotReady, Started, StartTask
from rlframe.coordinator.param_store import ParamStore
from rlframe.coordinator.workers.evaluator_worker import EvaluatorWorker
from rlframe.errors import StoppedError
from rlframe.programs.options.make_experiment import make_experiment
from rlframe.programs.policies.evaluation import Evaluations
from tests.coordinator.workers.caller import Caller
from tests.coordinator.workers.test_collector_worker import cartpole_params
from tests.fakes import counting_agent
from tests.waiting import wait_until

POLICY = "main"


def always(action: int, params):
    """Parameters that have DQN value one action above the other, whatever it sees."""
    last_bias = np.eye(2, dtype=np.float32)[action]
    return jax.tree.map(lambda leaf: last_bias if leaf.shape == (2,) else np.zeros_like(leaf), params)


def evaluate(version: int) -> StartTask:
    return StartTask("evaluate", POLICY, {"params_version": version})


@pytest.fixture
def make():
    """Makes workers, each with the caller of its task."""
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
    """A worker, and a store with two versions of a policy that differ."""
    store = ParamStore()
    params, agent = cartpole_params(DQN, DQNConfig())
    for version in (1, 2):
        store.put(POLICY, version, always(version - 1, params))
    described = make_experiment("dqn", eval_episodes=4, env_type="loop")
    return make(functools.partial(Evaluations, described), agent, store)


@pytest.fixture
def endless(make):
    """A worker whose evaluations end when they are told to."""
    store = ParamStore()
    store.put(POLICY, 3, {"w": np.float32(0.5)})
    return make(Endless, counting_agent(), store)


def evaluated(call: Caller, version: int) -> Evaluated:
    assert call.until_done("start_task", evaluate(version)) == Started({"params_version": version})
    reply = call.until_done("get_data", GetData())
    assert call.until_done("close_task", False) == Closed({})
    call.attempt += 1
    return reply


def test_an_evaluation_is_of_exactly_the_version_that_was_asked_for_and_repeats(evaluator):
    first, second, again = (evaluated(evaluator, version) for version in (1, 2, 1))
    assert (first.params_version, second.params_version) == (1, 2)
    assert set(first.values) == {"return_mean", "return_std", "length_mean", "episodes"}
    assert first.values["episodes"] == 4 and first.values["return_mean"] == first.values["length_mean"] > 0
    assert again == first
    assert second.values != first.values


def test_what_was_compiled_for_one_evaluation_serves_the_next(evaluator):
    evaluated(evaluator, 1)
    inferencer = evaluator.worker._evaluator._inferencer
    evaluated(evaluator, 2)
    assert evaluator.worker._evaluator._inferencer is inferencer
    assert inferencer.stats()["compilations"] == 1


def test_an_evaluation_is_made_once_however_often_it_is_asked_for(evaluator):
    evaluator.until_done("start_task", evaluate(1))
    first = evaluator.until_done("get_data", GetData())
    evaluator.worker._evaluator.evaluate = None  # a call would fail
    assert evaluator.until_done("get_data", GetData()) == first


def test_a_version_that_is_gone_cannot_be_evaluated(evaluator):
    failed = evaluator.until_done("start_task", evaluate(7))
    assert (failed.error, failed.is_permanent) == ("VersionGoneError", True)
    assert failed.message.startswith("Version 7 of policy 'main' cannot be evaluated: the param store has 1, 2.")


class Endless:
    """An evaluation that ends when it is told to."""

    def __init__(self, agent, learner) -> None:
        self.steps, self.told = 0, False

    def evaluate(self):
        while not self.told:
            self.steps += 1
        raise StoppedError("told to")

    def stop(self):
        self.told = True


def test_an_evaluation_that_goes_on_makes_progress_and_can_be_closed(endless):
    call = endless
    call.until_done("start_task", evaluate(3))
    assert call.say("get_data", GetData()) == NotReady()
    before = call.worker._progress_marker()
    wait_until(lambda: call.worker._progress_marker() > before)
    assert call.until_done("close_task", False) == Closed({})
    call.attempt = 1  # and the next one begins
    call.until_done("start_task", evaluate(3))
    assert call.say("get_data", GetData()) == NotReady()


def test_an_evaluator_does_not_collect(endless):
    failed = endless.until_done("start_task", StartTask("collect", POLICY))
    assert isinstance(failed, Failed) and failed.message == "evaluator/0 cannot collect: it works at evaluate alone."
