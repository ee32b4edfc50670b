"""Tests of the worker that collects."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from rlframe.actors import Actor
from rlframe.agents import DQN, IMPALA, PPO, DQNConfig, IMPALAConfig, PPOConfig
from rlframe.coordinator.messages import Closed, Collected, GetData, NotReady, Started, StartTask
from rlframe.coordinator.param_store import ParamStore
from rlframe.coordinator.workers.game_workers import CollectorWorker
from rlframe.envs import SyncEnv
from rlframe.errors import EnvError, StoppedError
from rlframe.replay import ReplayBuffer
from tests.coordinator.workers.caller import Caller
from tests.fakes import CountingEnv, RecordingBuffer, counting_agent
from tests.waiting import wait_until

POLICY = "main"
COLLECT = StartTask("collect", POLICY)


class FullBuffer(RecordingBuffer):
    """A buffer with room for three steps. Like a buffer in shared memory, it blocks while it is full."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stopped = False

    def add(self, env_ids, step):
        if len(self.steps) == 3:
            wait_until(lambda: self.is_stopped)
            raise StoppedError("stopped")
        super().add(env_ids, step)


@pytest.fixture
def store():
    store = ParamStore()
    store.put(POLICY, 3, {"w": np.float32(0.5)})
    return store


@pytest.fixture
def make(store):
    """Return a function that makes a worker, and returns a caller for its task."""
    workers = []

    def make(make_actor, agent=None, *, index=0, task_id="task", params=store):
        worker = CollectorWorker(make_actor, agent or counting_agent(), params, f"collector/{index}", index, 0)
        workers.append(worker)
        return Caller(worker, task_id)

    yield make
    for worker in workers:
        worker.close()


def counting_actor(buffer, inferencer, rank) -> Actor:
    return Actor(lambda: SyncEnv(CountingEnv, 2, "loop"), inferencer, buffer, rank)


def collector(make, buffer=None, **options) -> Caller:
    return make(functools.partial(counting_actor, buffer or RecordingBuffer()), **options)


# --- collecting


def test_collector_acts_with_the_version_in_the_store_and_uses_its_index_as_rank(make):
    buffer = RecordingBuffer()
    call = collector(make, buffer, index=2)
    assert call.until_done("start_task", COLLECT) == Started({"params_version": 3, "rank": 2, "num_envs": 2})
    assert buffer.steps == []
    collected = call.until_done("get_data", GetData(steps=5, seconds=60.0))
    assert collected == Collected(
        {
            "rank": 2,
            "incarnation": 0,
            "env_steps": 6,
            "episodes": 2,
            "return_sum": 6.0,
            "length_sum": 6.0,
            "logged": {},
        },
        3,
        False,
        6,
    )
    env_ids, step = buffer.steps[-1]
    assert len(buffer.steps) == 3 and env_ids[0] // 1_000_000 == 2
    assert step.agent_output.extras["w"][0] == 0.5


def test_counters_add_up_during_a_task_and_are_the_result_of_the_task(make):
    call = collector(make)
    call.until_done("start_task", COLLECT)
    call.until_done("get_data", GetData(steps=6, seconds=60.0))
    collected = call.until_done("get_data", GetData(steps=6, seconds=60.0))
    assert (collected.stats["env_steps"], collected.stats["episodes"]) == (12, 4)
    result = dict(call.until_done("close_task", True).result)
    assert result.pop("env_steps_per_second") > 0.0 and result == collected.stats


def test_collector_uses_a_newer_version_at_once(make, store):
    call = collector(make)
    call.until_done("start_task", COLLECT)
    assert call.until_done("get_data", GetData(steps=2, seconds=60.0)).params_version == 3
    store.put(POLICY, 4, {"w": np.float32(0.0)})
    assert call.until_done("get_data", GetData(steps=2, seconds=60.0)).params_version == 4


def test_request_without_steps_collects_until_the_time_is_up(make):
    call = collector(make)
    call.until_done("start_task", COLLECT)
    # A busy machine may leave no time for a step.
    wait_until(lambda: call.until_done("get_data", GetData(seconds=0.05)).stats["env_steps"] > 0)


def test_start_waits_for_the_first_version_and_compiles(make):
    empty = ParamStore()
    call = collector(make, params=empty)
    header = call.header()
    wait_until(lambda: call.worker.start_task(header, COLLECT) == NotReady("params"))
    assert call.worker.ping().phase == "starting"
    empty.put(POLICY, 1, {"w": np.float32(0.0)})
    assert call.repeat_until_done("start_task", COLLECT, header).info["params_version"] == 1
    assert call.worker._inferencer.stats()["compilations"] == 1


def test_task_that_waits_for_the_first_version_can_be_closed(make):
    call = collector(make, params=ParamStore())
    call.call_once("start_task", COLLECT)
    assert call.until_done("close_task", False) == Closed({})
    assert call.worker.ping().phase == "idle"


def test_collector_that_waits_for_room_reports_the_wait_and_can_be_closed(make):
    buffer = FullBuffer()

    def make_actor(inferencer, rank):
        actor = counting_actor(buffer, inferencer, rank)
        stop = actor.stop
        actor.stop = lambda: (stop(), setattr(buffer, "is_stopped", True))  # as `end_waits` of a shared buffer does
        return actor

    call = make(make_actor)
    call.until_done("start_task", COLLECT)
    header = call.header()
    wait_until(lambda: call.worker.get_data(header, GetData(seconds=60.0)) == NotReady("data"))
    before = call.worker.ping()
    assert call.worker.ping() == before and before.phase == "running"
    assert call.until_done("close_task", True).result["env_steps"] == 6


def test_collector_of_an_on_policy_agent_waits_for_the_next_version(make):
    params, agent = cartpole_params(PPO, PPOConfig(unroll_length=8))
    store = ParamStore()
    store.put(POLICY, 1, params)
    buffer = ReplayBuffer(agent)
    call = make(functools.partial(cartpole_actor, buffer), agent, params=store)
    call.until_done("start_task", COLLECT)
    collected = call.until_done("get_data", GetData(seconds=0.1))
    while not collected.waits:  # a busy machine may need more calls
        collected = call.until_done("get_data", GetData(seconds=0.1))
    assert (buffer.stats()["steps"], collected.params_version) == (8 * 2, 1)
    store.put(POLICY, 2, params)
    collected = call.until_done("get_data", GetData(steps=1, seconds=60.0))
    assert (buffer.stats()["steps"], collected.params_version) == (9 * 2, 2)


@pytest.mark.parametrize(
    ("agent_cls", "config"),
    [(DQN, DQNConfig()), (IMPALA, IMPALAConfig(unroll_length=8, learning_rate=6e-4))],
    ids=["dqn", "impala"],
)
def test_collector_fills_a_real_buffer(make, agent_cls, config):
    params, agent = cartpole_params(agent_cls, config)
    store = ParamStore()
    store.put(POLICY, 1, params)
    buffer = ReplayBuffer(agent)
    call = make(functools.partial(cartpole_actor, buffer), agent, params=store)
    call.until_done("start_task", COLLECT)
    stats = call.until_done("get_data", GetData(steps=100, seconds=60.0)).stats
    assert stats["env_steps"] >= 100 and stats["return_sum"] == stats["length_sum"] > 0
    assert buffer.stats()["steps"] >= 100 and buffer.stats()["added"] > 0


def test_environment_failure_becomes_a_failed_reply_and_the_next_attempt_makes_a_new_actor(make):
    made = []

    def make_actor(inferencer, rank):
        made.append(counting_actor(buffer, inferencer, rank))
        return made[-1]

    buffer = RecordingBuffer()
    call = make(make_actor)
    call.until_done("start_task", COLLECT)

    def fail(*args):
        raise EnvError("environment 1 fell over")

    made[0]._steppers[0].env.step = fail
    failed = call.until_done("get_data", GetData(steps=2, seconds=60.0))
    assert (failed.error, failed.message, failed.is_permanent) == ("EnvError", "environment 1 fell over", False)
    call.attempt = 1
    call.until_done("start_task", COLLECT)
    stats = call.until_done("get_data", GetData(steps=2, seconds=60.0)).stats
    assert (stats["incarnation"], stats["env_steps"]) == (1, 2)


@functools.cache
def cartpole_agent(agent_cls, config):
    env = SyncEnv("gymnasium:CartPole-v1", 1, "loop")
    agent = agent_cls(config, env.observation_spec, env.action_spec)
    env.close()
    return agent


def cartpole_params(agent_cls, config):
    """Return (first published parameters, agent)."""
    agent = cartpole_agent(agent_cls, config)
    params = agent.initial_params(jax.random.PRNGKey(0))
    published = agent.actor_params(params, agent.initial_learner_state(params))
    return jax.tree.map(np.asarray, published), agent


def cartpole_actor(buffer, inferencer, rank) -> Actor:
    return Actor(lambda seed: SyncEnv("gymnasium:CartPole-v1", 2, "loop", seed=seed), inferencer, buffer, rank)
