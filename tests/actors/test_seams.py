"""Tests of the objects that an Actor accepts as inferencer and buffer, and of the errors for other objects."""

from __future__ import annotations

import concurrent.futures
import functools
import sys
import threading

import jax
import numpy as np
import pytest

from rlframe import shutdown
from rlframe.actors import Actor, Evaluator
from rlframe.actors.actor_replay import ActorReplay
from rlframe.agents import PPO, PPOConfig
from rlframe.agents.trees import zero_timestep
from rlframe.errors import EnvError, UsageError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.learners import Learner, LearnerConfig
from rlframe.replay import ReplayBuffer
from rlframe.replay.reverb import ReverbReplayBuffer
from rlframe.types import AgentOutput
from tests.extras import needs
from tests.fakes import ACTION_SPEC, OBSERVATION_SPEC, CountingEnv, FixedParams, counting_agent
from tests.waiting import wait_until


class OnlyInference:
    """An object that has only `inference`. The action is the step type, so a test can match actions to requests."""

    def inference(self, env_ids, timestep):
        return AgentOutput(timestep.step_type.astype(np.int32), {"w": np.ones(len(env_ids), np.float32)})


class WithState(OnlyInference):
    def inference(self, env_ids, timestep, state):
        assert state == ()
        return super().inference(env_ids, timestep)._replace(params_version=7), state


class Adds:
    def __init__(self):
        self.added = []

    def add(self, env_ids, step):
        self.added.append((env_ids, step))


class AddsData:
    def __init__(self):
        self.added = []

    def add(self, data):
        self.added.append(data)


class ListThatAdds(list):
    def add(self, env_ids, step):
        self.append((env_ids, step))


class WithoutReferences:
    __slots__ = ()

    def add(self, env_ids, step):
        pass


@pytest.mark.parametrize(("inferencer", "version"), [(OnlyInference(), -1), (WithState(), 7)])
@pytest.mark.parametrize("make", [Adds, AddsData])
def test_actor_works_with_objects_that_only_have_inference_and_add(inferencer, version, make):
    buffer = make()
    actor = Actor(CountingEnv(length=2), inferencer, buffer)
    for _ in range(5):
        actor.step()
    assert (actor.rank, actor.incarnation, actor.env_steps, actor.episodes) == (0, 0, 4, 2)
    assert [env_ids.tolist() for env_ids, _ in buffer.added] == [[0]] * 5
    for _, step in buffer.added:
        assert step.agent_output.action == step.timestep.step_type
        assert (step.params_version, step.agent_state) == (version, ())
    assert [int(step.next_timestep.step_type[0]) for _, step in buffer.added] == [1, 2, 0, 1, 2]
    actor.close()


def test_actor_keeps_its_given_rank_if_the_buffer_assigns_none():
    buffer = Adds()
    actor = Actor(CountingEnv(), OnlyInference(), buffer, rank=3)
    actor.step()
    assert actor.rank == 3 and buffer.added[0][0].tolist() == [3_000_000]
    actor.close()


def test_inference_without_state_argument_works_for_stateless_agent():
    agent = PPO(PPOConfig(), OBSERVATION_SPEC, ACTION_SPEC)
    params = agent.initial_params(jax.random.PRNGKey(0))
    inferencer = Inferencer(InferencerConfig(), agent, FixedParams(params))
    output, state = inferencer.inference(np.array([0]), zero_timestep(OBSERVATION_SPEC, 1))
    assert output.action.shape == (1,) and state == ()


@pytest.mark.parametrize(
    ("inferencer", "buffer", "match"),
    [
        (object(), Adds(), r"A object cannot be an inferencer: it needs inference\(env_ids, timestep, state\)"),
        (
            OnlyInference(),
            object(),
            r"A object was given as the replay buffer of an Actor: it needs add\(",
        ),
    ],
)
def test_missing_method_is_named(inferencer, buffer, match):
    with pytest.raises(UsageError, match=match):
        Actor(CountingEnv(), inferencer, buffer)


def test_inference_result_of_wrong_type_is_rejected():
    class Bare:
        def inference(self, env_ids, timestep):
            return np.zeros(len(env_ids), np.int32)

    actor = Actor(CountingEnv(), Bare(), Adds())
    with pytest.raises(UsageError, match="Bare.inference returned a ndarray. It must be an AgentOutput"):
        actor.step()
    actor.close()


def test_on_policy_actor_rejects_inferencer_without_wait_for_version():
    agent = PPO(PPOConfig(unroll_length=1), OBSERVATION_SPEC, ACTION_SPEC)

    class Acts:
        def inference(self, env_ids, timestep):
            zeros = np.zeros(len(env_ids), np.float32)
            return AgentOutput(np.zeros(len(env_ids), np.int32), {"log_prob": zeros, "value": zeros}, 1)

    actor = Actor(CountingEnv(), Acts(), ReplayBuffer(agent))
    with pytest.raises(UsageError, match=r"is a Acts without the method wait_for_version\(\)"):
        actor.run()
    actor.close()


def test_evaluator_rejects_inferencer_without_refresh():
    with pytest.raises(UsageError, match=r"without the method refresh\(\)"):
        Evaluator(CountingEnv(), OnlyInference(), episodes=1).evaluate()


@pytest.mark.system
def test_node_outside_a_program_is_rejected_with_the_fix():
    needs("launchpad")
    import launchpad as lp

    node = lp.CourierNode(OnlyInference)
    learner = functools.partial(Learner, LearnerConfig(), counting_agent())
    inferencer = functools.partial(Inferencer, InferencerConfig(), counting_agent())
    for name, make in (
        ("inferencer", lambda: Actor(CountingEnv(), node, Adds())),
        ("replay buffer", lambda: Actor(CountingEnv(), OnlyInference(), node)),
        ("EnvServer", lambda: Actor(node, OnlyInference(), Adds())),
        ("replay buffer", lambda: learner(node)),
        ("replay buffer", lambda: learner(lp.ReverbNode(ReverbReplayBuffer.tables(counting_agent())))),
        ("learner", lambda: inferencer(node)),
        ("learner", lambda: inferencer([{"of": (functools.partial(print, node),)}])),
    ):
        match = rf"A (Courier|Reverb)Node was given as the {name}: give the handle that program.add_node\(node\)"
        with pytest.raises(UsageError, match=match):
            make()


@pytest.mark.system
def test_reverb_node_of_the_buffer_class_is_rejected_with_the_fix():
    needs("launchpad", "reverb")
    import launchpad as lp

    with pytest.raises(UsageError, match=r"write lp.ReverbNode\(ReverbReplayBuffer.tables\(agent\)\)"):
        lp.ReverbNode(ReverbReplayBuffer)._priority_tables_fn()


@pytest.mark.parametrize("learner", [object(), None])
def test_inferencer_names_the_missing_method_of_its_learner(learner):
    with pytest.raises(UsageError, match=r"it needs get_params\(known_version\)"):
        Inferencer(InferencerConfig(), counting_agent(), learner).refresh()


@pytest.mark.parametrize("make", [Adds, AddsData, ListThatAdds, WithoutReferences])
def test_second_actor_without_a_rank_is_rejected_if_the_buffer_assigns_none(make):
    buffer = make()
    first = Actor(CountingEnv(), OnlyInference(), buffer)
    for rank in (None, 0):
        with pytest.raises(UsageError, match=rf"same {make.__name__}, .*no claim_rank\(\).*rank=0\), Actor"):
            Actor(CountingEnv(), OnlyInference(), buffer, rank)
    assert Actor(CountingEnv(), OnlyInference(), buffer, rank=1).rank == 1
    assert Actor(CountingEnv(), OnlyInference(), make()).rank == first.rank == 0


def test_reclaimed_rank_gets_the_next_incarnation_if_the_buffer_assigns_none():
    buffer = Adds()
    actors = [Actor(CountingEnv(), OnlyInference(), buffer, rank) for rank in (0, 1, 0)]
    assert [(actor.rank, actor.incarnation) for actor in actors] == [(0, 0), (1, 0), (0, 1)]
    with pytest.raises(UsageError, match="no claim_rank"):
        Actor(CountingEnv(), OnlyInference(), buffer)


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("fails", ["environment", "inferencer"])
def test_failed_actor_constructor_releases_its_rank_and_budget(rank, fails):
    buffer, parts = Adds(), {"environment": CountingEnv(), "inferencer": OnlyInference()}
    for _ in range(2):
        with pytest.raises((UsageError, EnvError)):
            Actor(*{**parts, fails: object()}.values(), buffer, rank, budget=4)
    actor = Actor(*parts.values(), buffer, rank, budget=4)
    assert (actor.rank, actor.incarnation) == (rank or 0, 0)
    thread = threading.Thread(target=actor.run)
    thread.start()
    wait_until(lambda: actor.env_steps == 4)
    actor.stop()
    thread.join()


@pytest.mark.parametrize("before", [None, 0])
@pytest.mark.parametrize("after", [None, 0])
def test_closed_actor_releases_its_rank_to_the_next_incarnation(before, after):
    buffer = Adds()
    for incarnation, rank in enumerate((before, after)):
        actor = Actor(CountingEnv(), OnlyInference(), buffer, rank)
        assert (actor.rank, actor.incarnation) == (0, incarnation)
        actor.close()
        actor.close()  # the second close must not release the rank of another actor


def test_concurrent_claims_get_different_incarnations_if_the_buffer_assigns_none():
    begin, before = threading.Barrier(4, timeout=60.0), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            for _ in range(100):
                buffer = Adds()

                def claim(buffer=buffer):
                    begin.wait()
                    return ActorReplay(buffer, dict, 0, None).incarnation

                claimed = [threads.submit(claim) for _ in range(4)]
                assert sorted(each.result() for each in claimed) == [0, 1, 2, 3]
    finally:
        sys.setswitchinterval(before)


def test_actor_in_a_program_node_needs_a_rank_if_the_buffer_assigns_none(monkeypatch):
    # Each node has a copy of the buffer, which does not have the ranks of Actors in other nodes.
    monkeypatch.setattr(shutdown, "_program", shutdown._Program(threading.Event(), lambda: None))
    with pytest.raises(UsageError, match="no claim_rank"):
        Actor(CountingEnv(), OnlyInference(), Adds())
    assert Actor(CountingEnv(), OnlyInference(), Adds(), rank=0).rank == 0
