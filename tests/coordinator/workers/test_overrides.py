"""What a task does otherwise than its worker was made to: what is applied, and what is refused by name."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from rlframe.actors import Actor
from rlframe.agents import DQN, IMPALA, DQNConfig, IMPALAConfig, Normalized
from rlframe.agents.dqn_heads import Quantiles
from rlframe.coordinator.messages import Failed, GetData, Learn, Started, StartTask
from rlframe.coordinator.param_store import ParamStore
from rlframe.coordinator.workers.collector_worker import CollectorWorker
from rlframe.coordinator.workers.evaluator_worker import EvaluatorWorker
from rlframe.coordinator.workers.learner_worker import LearnerWorker
from rlframe.coordinator.workers.overrides import FixedParamsAgent, with_config
from rlframe.envs import SyncEnv
from rlframe.errors import UsageError
from rlframe.learners import LearnerConfig
from rlframe.replay import ReplayBuffer
from tests.coordinator.workers.caller import Caller
from tests.fakes import ACTION_SPEC, OBSERVATION_SPEC, CountingEnv, RecordingBuffer, counting_agent

POLICY = "main"


class Drawn(ReplayBuffer):
    """A buffer from which the learner draws by itself."""

    fetches_by_key = False


@pytest.fixture
def store():
    return ParamStore()


@pytest.fixture
def call(store, tmp_path):
    """Makes the caller of a worker's task, by its role."""
    workers = []

    def make(role, make_actor=None):
        if role == "learner":
            buffer = Drawn(counting_agent())
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
        ("learn", {"env": {"length": 4}}, "A task to learn has no overrides 'env', only policy and learner"),
        ("collect", {"policy": {}}, "A task to collect has no overrides 'policy', only env and collector"),
        ("collect", {"envs": {}}, "Did you mean 'env'"),
        ("evaluate", {"env": {"length": 4}}, "A task to evaluate has no overrides 'env', none at all"),
        (
            "collect",
            {"collector": 0.5},
            "The overrides 'collector' of a task must be a dict of values by name, got 0.5",
        ),
        ("learn", {"policy": {"learning_rate": np.zeros(2)}}, "finite numbers, strings or other JSON values"),
        ("learn", {"policy": {"learning_rate": float("nan")}}, "finite numbers, strings or other JSON values"),
    ],
)
def test_overrides_that_a_task_cannot_have_are_refused_where_it_is_made(kind, overrides, message):
    with pytest.raises(UsageError, match=message):
        StartTask(kind, POLICY, overrides=overrides)


def test_overrides_are_the_same_after_a_journal():
    assert collect(env={"sizes": (1, 2)}) == collect(env={"sizes": [1, 2]})


# --- a learner's


def test_a_learner_learns_by_the_config_of_its_task_and_says_so_beside_the_parameters(call, store):
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
    assert store.get(POLICY).params["w"] == 0.25  # of the way to the reward, which is 1


def test_another_task_of_a_learner_goes_on_from_what_the_one_before_saved(call, store):
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
            "'learning_rat' cannot be overridden (policy): it is no number or field of",
        ),
        ({"policy": {"prioritized": True}}, "change the replay_spec of CountingAgent"),
        ({"learner": {"checkpoint_dir": "/"}}, "'checkpoint_dir' cannot be overridden (learner)"),
        ({"learner": {"checkpoint_every": 0}}, "checkpoint_every must be at least 1"),
    ],
)
def test_what_a_learner_cannot_apply_ends_its_task_for_good(call, overrides, message):
    failed = call("learner").until_done("start_task", learn(**overrides))
    assert isinstance(failed, Failed) and failed.is_permanent and failed.error == "UsageError"
    assert message in failed.message


def test_hyper_parameters_that_an_agents_config_refuses_are_refused():
    agent = DQN(DQNConfig(), OBSERVATION_SPEC, ACTION_SPEC)
    with pytest.raises(UsageError, match="DQNConfig.learning_rate must be above 0, got -1"):
        with_config(agent, {"learning_rate": -1})
    with pytest.raises(UsageError, match="DQNConfig.learning_rate must be a number, got 'fast'"):
        with_config(agent, {"learning_rate": "fast"})
    with pytest.raises(UsageError, match="change the parameters of DQN"):
        with_config(agent, {"head": Quantiles(5)})
    other = with_config(agent, {"learning_rate": 0.5})
    assert (type(other), other.cfg.learning_rate, agent.cfg.learning_rate) == (DQN, 0.5, 2.5e-4)
    assert with_config(agent, {}) is agent


def test_overrides_reach_the_agent_inside_of_a_transform():
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


# --- a collector's


def test_a_collector_steps_the_environments_of_its_task_and_acts_by_its_numbers(call, store):
    store.put(POLICY, 3, {"w": np.float32(0.5)})
    buffer = RecordingBuffer()
    caller = call("collector", functools.partial(actor, buffer))
    caller.until_done("start_task", collect(env={"length": 5}, collector={"w": 2.0}))
    collected = caller.until_done("get_data", GetData(steps=10, seconds=60.0))
    assert (collected.stats["episodes"], collected.stats["length_sum"], collected.length) == (2, 10.0, 10)
    assert {float(w) for _, step in buffer.steps for w in step.agent_output.extras["w"]} == {2.0}
    assert caller.until_done("get_data", GetData(steps=3, seconds=60.0)).length == 4  # of this call alone


def test_collectors_explore_by_the_epsilon_that_each_was_told():
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
    assert FixedParamsAgent(agent, {"epsilon": 0.5}).replay_spec == agent.replay_spec


def test_numbers_that_an_agent_does_not_act_by_are_refused_by_name():
    dqn = DQN(DQNConfig(), OBSERVATION_SPEC, ACTION_SPEC)
    with pytest.raises(UsageError, match="'epsilom' cannot be overridden.*there are epsilon. Did you mean 'epsilon'"):
        FixedParamsAgent(dqn, {"epsilom": 0.5})
    with pytest.raises(UsageError, match="The collector override epsilon must be a number, got 'much'"):
        FixedParamsAgent(dqn, {"epsilon": "much"})
    impala = IMPALA(IMPALAConfig(), OBSERVATION_SPEC, ACTION_SPEC)
    with pytest.raises(UsageError, match="'epsilon' cannot be overridden .* what IMPALA acts by; there are none"):
        FixedParamsAgent(impala, {"epsilon": 0.5})


def test_environments_that_cannot_be_told_are_refused_by_name(call, store):
    store.put(POLICY, 3, {"w": np.float32(0.5)})
    buffer = RecordingBuffer()
    failed = call("collector", lambda inferencer, rank: actor(buffer, inferencer, rank)).until_done(
        "start_task", collect(env={"length": 5})
    )
    assert failed.is_permanent and "environments cannot be told {'length': 5}" in failed.message
    unknown = call("collector", functools.partial(actor, buffer)).until_done("start_task", collect(env={"lenght": 5}))
    assert isinstance(unknown, Failed) and "lenght" in unknown.message


def test_who_acts_by_a_policy_has_the_hyper_parameters_that_lie_beside_it(call, store):
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
