"""Tests of a task's overrides: valid overrides are applied, and invalid overrides are refused by name."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest

from rlframe.actors import Actor
from rlframe.agents import DQN, IMPALA, DQNConfig, IMPALAConfig, Normalized
from rlframe.agents.dqn_heads import Quantiles
from rlframe.coordinator.messages import Failed, GetData, Learn, Started, StartTask
from rlframe.coordinator.param_store import ParamStore
from rlframe.coordinator.workers.game_workers import CollectorWorker, EvaluatorWorker
from rlframe.coordinator.workers.learner_worker import LearnerWorker
from rlframe.coordinator.workers.overrides import FixedParamsAgent, with_config
from rlframe.envs import SyncEnv
from rlframe.errors import UsageError
from rlframe.learners import LearnerConfig
from rlframe.replay import ReplayBuffer
from tests.coordinator.workers.caller import Caller
from tests.fakes import ACTION_SPEC, OBSERVATION_SPEC, CountingEnv, RecordingBuffer, counting_agent

POLICY = "main"


class LearnerSampledBuffer(ReplayBuffer):
    """A buffer from which the learner draws its batches."""

    fetches_by_key = False


@pytest.fixture
def store():
    return ParamStore()


@pytest.fixture
def call(store, tmp_path):
    """Return a function that makes a worker of a role, and returns a caller for its task."""
    workers = []

    def make(role, make_actor=None):
        if role == "learner":
            buffer = LearnerSampledBuffer(counting_agent())
            cfg = LearnerConfig(checkpoint_dir=str(tmp_path / "checkpoints"), resume=True)
            worker = LearnerWorker(cfg, counting_agent(), buffer, store, "learner/0", 0, 0)
            worker.buffer = buffer
        elif role == "collector":
            worker = CollectorWorker(make_actor, counting_agent(), store, "collector/0", 0, 0)
        else:
            made = []
            worker = EvaluatorWorker(lambda agent, _: made.append(agent), counting_agent(), store, "evaluator/0", 0, 0)
            worker.made = made
        workers.append(worker)
        return Caller(worker, "task")

    yield make
    for worker in workers:
        worker.close()


def actor(buffer, inferencer, rank, env_kwargs=None) -> Actor:
    return Actor(lambda: SyncEnv(CountingEnv, 2, "loop", env_kwargs=env_kwargs or {}), inferencer, buffer, rank)


def learn(**overrides) -> StartTask:
    return StartTask("learn", POLICY, overrides=overrides)


def collect(**overrides) -> StartTask:
    return StartTask("collect", POLICY, overrides=overrides)


# --- the messages


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        (
            "learn",
            {"env": {"length": 4}},
            "accepts no overrides for 'env'. It accepts overrides for policy and learner",
        ),
        ("collect", {"policy": {}}, "accepts no overrides for 'policy'. It accepts overrides for env and collector"),
        ("collect", {"envs": {}}, "Did you mean 'env'"),
        (
            "evaluate",
            {"env": {"length": 4}},
            "A task to evaluate accepts no overrides for 'env'. It accepts no overrides at all",
        ),
        (
            "collect",
            {"collector": 0.5},
            "The overrides 'collector' of a task must be a dict of values by name, got 0.5",
        ),
        ("learn", {"policy": {"learning_rate": np.zeros(2)}}, "finite numbers, strings or other JSON values"),
        ("learn", {"policy": {"learning_rate": float("nan")}}, "finite numbers, strings or other JSON values"),
    ],
)
def test_invalid_overrides_are_refused_by_start_task(kind, overrides, message):
    with pytest.raises(UsageError, match=message):
        StartTask(kind, POLICY, overrides=overrides)


def test_overrides_are_converted_to_their_json_form():
    assert collect(env={"sizes": (1, 2)}) == collect(env={"sizes": [1, 2]})


# --- learner


def test_learner_applies_its_overrides_and_stores_them_with_the_parameters(call, store):
    caller = call("learner")
    start = learn(policy={"learning_rate": 0.25}, learner={"max_learner_steps": 3})
    assert isinstance(caller.until_done("start_task", start), Started)
    assert store.get(POLICY).hparams == {"learner_steps": 0, "policy": {"learning_rate": 0.25}}
    worker = caller.worker
    assert worker._learner is not None and caller.until_done("data_demand").batches == 3
    collector = call("collector", functools.partial(actor, worker.buffer))
    collector.until_done("start_task", collect())
    collector.until_done("get_data", GetData(steps=16, seconds=60.0))
    assert caller.until_done("learn", Learn(1, seconds=60.0)).learner_steps == 1
    assert store.get(POLICY).params["w"] == 0.25  # one update with the rate 0.25 toward the reward 1


def test_next_task_of_a_learner_continues_from_the_last_checkpoint(call, store):
    caller = call("learner")
    caller.until_done("start_task", learn(policy={"learning_rate": 0.5}))
    collector = call("collector", functools.partial(actor, caller.worker.buffer))
    collector.until_done("start_task", collect())
    collector.until_done("get_data", GetData(steps=16, seconds=60.0))
    caller.until_done("learn", Learn(1, seconds=60.0))
    caller.until_done("close_task", True)
    caller.task_id = "another"
    started = caller.until_done(
        "start_task", StartTask("learn", POLICY, {"epoch": 1}, {"policy": {"learning_rate": 0.1}})
    )
    assert (started.info["learner_steps"], started.info["resumed"]) == (1, True)
    caller.until_done("learn", Learn(1, seconds=60.0))
    assert store.get(POLICY).params["w"] == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"policy": {"learning_rat": 1.0}},
            "'learning_rat' cannot be overridden (policy). In ",
        ),
        ({"policy": {"prioritized": True}}, "change the replay_spec of CountingAgent"),
        ({"learner": {"checkpoint_dir": "/"}}, "'checkpoint_dir' cannot be overridden (learner)"),
        ({"learner": {"checkpoint_every": 0}}, "checkpoint_every must be at least 1"),
    ],
)
def test_invalid_learner_overrides_fail_the_task_permanently(call, overrides, message):
    failed = call("learner").until_done("start_task", learn(**overrides))
    assert isinstance(failed, Failed) and failed.is_permanent and failed.error == "UsageError"
    assert message in failed.message


def test_values_rejected_by_the_agent_config_are_refused():
    agent = DQN(DQNConfig(), OBSERVATION_SPEC, ACTION_SPEC)
    with pytest.raises(UsageError, match="DQNConfig.learning_rate must be above 0, got -1"):
        with_config(agent, {"learning_rate": -1})
    with pytest.raises(UsageError, match="DQNConfig.learning_rate: 'fast' is not a schedule"):
        with_config(agent, {"learning_rate": "fast"})
    with pytest.raises(UsageError, match="change the parameters of DQN"):
        with_config(agent, {"head": Quantiles(5)})
    other = with_config(agent, {"learning_rate": 0.5})
    assert (type(other), other.cfg.learning_rate, agent.cfg.learning_rate) == (DQN, 0.5, 2.5e-4)
    assert with_config(agent, {}) is agent


@pytest.mark.system
def test_overrides_apply_to_the_agent_inside_a_transform():
    agent = Normalized(DQN(DQNConfig(), OBSERVATION_SPEC, ACTION_SPEC), observation_clip=3.0)
    other = with_config(agent, {"learning_rate": 0.5})
    assert (other.agent.cfg.learning_rate, other.cfg.learning_rate, other.observation_clip) == (0.5, 0.5, 3.0)
    with pytest.raises(UsageError, match="change the replay_spec of DQN"):
        with_config(agent, {"n_step": 2})
    params = agent.initial_params(np.zeros(2, np.uint32))
    acting = agent.actor_params(params, agent.initial_learner_state(params))
    timestep, key = SyncEnv(CountingEnv, 64, "loop").reset(), np.array([0, 7], np.uint32)
    greedy = agent.eval_step(key, acting, timestep, ())[0].action
    never = agent.with_inner(lambda inner: FixedParamsAgent(inner, {"epsilon": 1e-9}))
    assert acting.params.epsilon == 1.0
    np.testing.assert_array_equal(never.actor_step(key, acting, timestep, ())[0].action, greedy)


# --- collector


def test_collector_applies_env_options_and_fixed_actor_parameters(call, store):
    store.put(POLICY, 3, {"w": np.float32(0.5)})
    buffer = RecordingBuffer()
    caller = call("collector", functools.partial(actor, buffer))
    caller.until_done("start_task", collect(env={"length": 5}, collector={"w": 2.0}))
    collected = caller.until_done("get_data", GetData(steps=10, seconds=60.0))
    assert (collected.stats["episodes"], collected.stats["length_sum"], collected.length) == (2, 10.0, 10)
    assert {float(w) for _, step in buffer.steps for w in step.agent_output.extras["w"]} == {2.0}
    assert caller.until_done("get_data", GetData(steps=3, seconds=60.0)).length == 4  # only the steps of this call


def test_fixed_epsilon_controls_the_exploration():
    agent = DQN(DQNConfig(), OBSERVATION_SPEC, ACTION_SPEC)
    params = agent.initial_params(np.zeros(2, np.uint32))
    acting = agent.actor_params(params, agent.initial_learner_state(params))
    assert acting.epsilon == 1.0
    timestep = SyncEnv(CountingEnv, 64, "loop").reset()
    key = np.array([0, 7], np.uint32)
    greedy = agent.eval_step(key, acting, timestep, ())[0].action
    never = FixedParamsAgent(agent, {"epsilon": 1e-9}).actor_step(key, acting, timestep, ())[0].action
    half = FixedParamsAgent(agent, {"epsilon": 0.5}).actor_step(key, acting, timestep, ())[0].action
    assert np.array_equal(never, greedy) and 8 < np.sum(np.asarray(half) != np.asarray(greedy)) < 40
    assert copy.copy(FixedParamsAgent(agent, {"epsilon": 0.5})).replay_spec == agent.replay_spec


def test_unknown_actor_parameters_are_refused_by_name():
    dqn = DQN(DQNConfig(), OBSERVATION_SPEC, ACTION_SPEC)
    with pytest.raises(UsageError, match="'epsilom' cannot be overridden.*overridden: epsilon. Did you mean 'epsilon'"):
        FixedParamsAgent(dqn, {"epsilom": 0.5})
    with pytest.raises(UsageError, match="The collector override epsilon must be a number, got 'much'"):
        FixedParamsAgent(dqn, {"epsilon": "much"})
    impala = IMPALA(IMPALAConfig(total_learner_steps=100), OBSERVATION_SPEC, ACTION_SPEC)
    with pytest.raises(
        UsageError, match="'epsilon' cannot be overridden .*In the actor parameters of IMPALA, nothing can"
    ):
        FixedParamsAgent(impala, {"epsilon": 0.5})


def test_env_overrides_without_env_kwargs_are_refused_by_name(call, store):
    store.put(POLICY, 3, {"w": np.float32(0.5)})
    buffer = RecordingBuffer()
    failed = call("collector", lambda inferencer, rank: actor(buffer, inferencer, rank)).until_done(
        "start_task", collect(env={"length": 5})
    )
    assert failed.is_permanent and "The env overrides {'length': 5} cannot be applied" in failed.message
    unknown = call("collector", functools.partial(actor, buffer)).until_done("start_task", collect(env={"lenght": 5}))
    assert isinstance(unknown, Failed) and "lenght" in unknown.message


def test_collectors_and_evaluators_apply_the_policy_overrides_in_the_store(call, store):
    store.put(POLICY, 3, {"w": np.float32(0.5)}, {"learner_steps": 7, "policy": {"learning_rate": 0.125}})
    caller = call("evaluator")
    for _ in range(2):
        caller.until_done("start_task", StartTask("evaluate", POLICY, {"params_version": 3}))
        caller.until_done("close_task", False)
        caller.attempt += 1
    assert {agent.cfg.learning_rate for agent in caller.worker.made} == {0.125}
    collector = call("collector", functools.partial(actor, RecordingBuffer()))
    collector.until_done("start_task", collect())
    assert collector.worker._inferencer.agent.cfg.learning_rate == 0.125
