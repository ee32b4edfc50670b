"""Test that an inference service gives the answers of an inline Inferencer, and survives the death of its learner."""

from __future__ import annotations

import contextlib
import pickle
import threading

import jax
import numpy as np
import pytest

from rlframe.agents import PPO, PPOConfig
from rlframe.errors import PeerError, UnavailableError, UsageError
from rlframe.handles import AsyncCall, resolve
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.inferencers.batching import bucket_of
from rlframe.learners import Learner, LearnerConfig
from rlframe.types import ENVS_PER_RANK, FIRST, TimeStep
from tests.fakes import ACTION_SPEC, OBSERVATION_SPEC, FixedParams, RecordingBuffer, counting_agent
from tests.ports import free_address
from tests.serving import client, running, serving
from tests.waiting import wait_until

DEADLINE = 60.0


def ppo():
    return PPO(PPOConfig(), OBSERVATION_SPEC, ACTION_SPEC)


def ppo_learner(agent):
    return Learner(LearnerConfig(), agent, RecordingBuffer())


def random_timestep(rows, seed):
    ones = np.ones(rows, np.float32)
    observation = np.random.default_rng(seed).normal(size=(rows, 2)).astype(np.float32)
    return TimeStep(np.full(rows, FIRST), ones, ones, observation)


def ask(inferencer, rows=2):
    timestep = TimeStep(*random_timestep(rows, 0))
    return inferencer.inference(np.arange(rows), timestep, {"seen": np.zeros(rows, np.float32)})


def test_service_gives_the_answers_of_an_inline_inferencer_with_fewer_calls():
    agent = ppo()
    learner = ppo_learner(agent)
    alone = Inferencer(InferencerConfig(greedy=True), agent, learner)
    service = Inferencer(InferencerConfig(greedy=True, max_wait=0.05, max_batch=64), agent, learner)
    rng = np.random.default_rng(0)
    plan = [[int(rows) for rows in rng.integers(1, 20, size=12)] for _ in range(8)]
    answers = {}

    def caller(caller_index):
        for number, rows in enumerate(plan[caller_index]):
            answers[caller_index, number] = service.inference(
                np.arange(rows), random_timestep(rows, 100 * caller_index + number), ()
            )

    with running(service):
        _wait_until_run(service)
        for rows in {
            bucket_of(rows, 64) for rows in range(1, 65)
        }:  # compile now, because a call that waits for a compilation can time out
            service.inference(np.arange(rows), random_timestep(rows, 0), ())
        before = service.stats()
        threads = [threading.Thread(target=caller, args=(caller_index,)) for caller_index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
    stats = service.stats()
    assert stats["requests"] - before["requests"] == 96 and stats["calls"] - before["calls"] < 48
    assert stats["compilations"] == before["compilations"] == 7
    # The inline Inferencer gets all rows in one call, so that it compiles only once.
    asked = [
        random_timestep(plan[caller_index][number], 100 * caller_index + number) for caller_index, number in answers
    ]
    together = jax.tree.map(lambda *leaves: np.concatenate(leaves), *asked)
    expected, _ = alone.inference(np.arange(len(together.reward)), together, ())
    np.testing.assert_array_equal(np.concatenate([output.action for output, _ in answers.values()]), expected.action)
    for name in expected.extras:
        answered_extras = np.concatenate([output.extras[name] for output, _ in answers.values()])
        np.testing.assert_allclose(answered_extras, expected.extras[name], rtol=1e-5, atol=1e-5)


def test_padding_does_not_change_answers():
    agent = ppo()
    service = Inferencer(InferencerConfig(greedy=True), agent, ppo_learner(agent))
    with running(service):
        _wait_until_run(service)
        timestep = random_timestep(5, seed=1)
        first, _ = service.inference(np.arange(5), timestep, ())
        for seed in range(3):  # now the padding contains rows of other calls
            service.inference(np.arange(8), random_timestep(8, seed), ())
            service.inference(np.arange(7), random_timestep(7, seed), ())
        again, _ = service.inference(np.arange(5), timestep, ())
    np.testing.assert_array_equal(first.action, again.action)
    for name in first.extras:
        np.testing.assert_array_equal(first.extras[name], again.extras[name])


def test_ranks_with_the_same_seed_draw_different_random_numbers():
    agent = ppo()
    inferencer = Inferencer(InferencerConfig(seed=3), agent, ppo_learner(agent))
    first = inferencer.get_state()

    def actions(rank):
        inferencer.set_state(first)
        env_ids = rank * ENVS_PER_RANK + np.arange(64)
        return inferencer.inference(env_ids, random_timestep(64, 0), ())[0].action.tolist()

    assert actions(0) == actions(0) and actions(1) == actions(1)
    assert len({str(actions(rank)) for rank in range(4)}) == 4


def launchpad_handle():
    import launchpad as lp
    from launchpad.launch.test_multi_threading import address_builder

    node = lp.CourierNode(FixedParams, {"w": np.float32(0.25)})
    address_builder.bind_addresses([node])
    return node.create_handle(), node.courier_address.resolve()


def courier_client():
    address = free_address()
    return client(address), address


@pytest.mark.parametrize("make", [launchpad_handle, courier_client])
def test_unused_inferencer_with_a_handle_can_be_pickled(make):
    handle, address = make()
    inferencer = pickle.loads(pickle.dumps(Inferencer(InferencerConfig(seed=5), counting_agent(), handle)))
    with serving(FixedParams({"w": np.float32(0.25)}), address):
        output, _ = ask(inferencer)
    assert output.extras["w"].tolist() == [0.25, 0.25]


def test_service_keeps_its_parameters_while_the_learner_is_down(caplog):
    address = free_address()
    learner = FixedParams({"w": np.float32(0.5)})
    service = Inferencer(InferencerConfig(learner_deadline=3.0), counting_agent(), client(address))
    server = contextlib.ExitStack()
    server.enter_context(serving(learner, address))
    with server, running(service):
        assert _answer_of_version(service, 1).extras["w"].tolist() == [0.5, 0.5]
        server.close()
        wait_until(lambda: f"continues with version 1 of the parameters: The learner at {address}" in caplog.text)
        assert ask(service)[0].params_version == 1
        learner.version, learner.params = 2, {"w": np.float32(0.75)}
        server.enter_context(serving(learner, address))
        assert _answer_of_version(service, 2).extras["w"].tolist() == [0.75, 0.75]


def test_service_fails_if_its_learner_never_answers():
    address = free_address()
    service = Inferencer(InferencerConfig(learner_deadline=0.5), counting_agent(), client(address))
    missed = rf"The learner at {address} did not answer publication_reader\(\) within 0.5 s"
    with pytest.raises(PeerError, match=missed):
        service.run()
    with pytest.raises(UnavailableError, match="has stopped"):
        ask(service)


def test_stopped_service_refuses_calls_and_cannot_run_again():
    service = Inferencer(InferencerConfig(), counting_agent(), FixedParams({"w": np.float32(0.5)}))
    with running(service):
        _answer_of_version(service, 1)
    with pytest.raises(UnavailableError, match="has stopped"):
        ask(service)
    with pytest.raises(UsageError, match="Make another Inferencer"):
        service.run()


class Broken(type(counting_agent())):
    def actor_step(self, rng, params, timestep, state):
        raise ZeroDivisionError("a bug of the agent")


def test_error_of_the_agent_is_raised_for_the_callers_and_ends_the_service():
    agent = Broken(counting_agent().cfg, OBSERVATION_SPEC, ACTION_SPEC)
    service = Inferencer(InferencerConfig(), agent, FixedParams({"w": np.float32(0.5)}))
    caught = []

    def call():
        _wait_until_run(service)
        try:
            ask(service)
        except ZeroDivisionError as error:
            caught.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    with pytest.raises(ZeroDivisionError, match="a bug of the agent"):
        service.run()
    caller.join(DEADLINE)
    assert len(caught) == 1


def test_client_gets_numpy_arrays_after_the_learner_starts():
    learner_address, address = free_address(), free_address()
    service = Inferencer(InferencerConfig(), counting_agent(), client(learner_address))
    with serving(service, address), running(service):
        remote = resolve(client(address), "inferencer", deadline=DEADLINE)
        # The service refuses the call, and the client repeats it, until the learner has sent parameters.
        call = AsyncCall(remote, "inference", _request(3))
        with serving(FixedParams({"w": np.float32(0.5)}), learner_address):
            output, state = call.result()
            wait_until(lambda: service.params_version == 1)
        assert type(output.action) is np.ndarray and output.params_version == 1
        assert state["seen"].tolist() == [1.0, 1.0, 1.0]
        env_ids, timestep, state = _request(3)
        with pytest.raises(UsageError, match=r"observation should be \[B, 2\] float32"):
            remote.inference(env_ids, timestep._replace(observation=np.zeros((3, 5), np.float32)), state)


def _request(rows):
    return np.arange(rows), random_timestep(rows, 0), {"seen": np.zeros(rows, np.float32)}


def _answer_of_version(service, version):
    """Call the service until an answer comes from this version of the parameters or a later one. Return the answer."""
    answers = []

    def answered():
        try:
            answers.append(ask(service)[0])
        except UnavailableError:
            return False
        return answers[-1].params_version >= version

    wait_until(answered)
    return answers[-1]


def _wait_until_run(service):
    """Wait until `run` has started the service."""
    wait_until(lambda: "calls" in service.stats())
