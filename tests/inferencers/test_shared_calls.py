"""Test that calls in shared memory get the same answers as calls over Courier, even if a service or a client dies."""

from __future__ import annotations

import multiprocessing
import os
import threading

import jax
import numpy as np
import pytest

from rlframe.agents import PPO, PPOConfig
from rlframe.errors import PeerError, UnavailableError, UsageError
from rlframe.handles import AsyncCall, resolve
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.inferencers.base import as_inference
from rlframe.learners import Learner, LearnerConfig
from rlframe.types import FIRST, TimeStep
from tests.fakes import ACTION_SPEC, OBSERVATION_SPEC, FixedParams, RecordingBuffer, counting_agent
from tests.ports import free_address
from tests.serving import CHILD_DEADLINE, Child, client, fixed_inferencer, running, serving
from tests.waiting import wait_until

DEADLINE = 60.0


def connect(*addresses, deadline=CHILD_DEADLINE):
    return as_inference(resolve([client(one) for one in addresses], "inferencer", deadline=deadline))


def request(rows, seed=0, state=None):
    ones = np.ones(rows, np.float32)
    observation = np.random.default_rng(seed).normal(size=(rows, 2)).astype(np.float32)
    seen = np.full(rows, seed, np.float32)
    return np.arange(rows), TimeStep(np.full(rows, FIRST), ones, ones, observation), {"seen": seen}


class CountedInferencer(Inferencer):
    """An Inferencer with two counters: `all` counts every call, `shared` counts the calls in shared memory."""

    def __init__(self, agent=None, learner=None, finds=True):
        super().__init__(
            InferencerConfig(greedy=agent is not None),
            agent or counting_agent(),
            learner or FixedParams({"w": np.float32(0.5)}),
        )
        self.shared = self.all = 0
        self._finds = finds

    def share_calls(self, name, capacity, request, answer):
        # If `_finds` is False, simulate a client on another machine: replace its token by one that does not exist.
        return super().share_calls(name if self._finds else name._replace(token=0), capacity, request, answer)

    def inference(self, env_ids, timestep, state):
        self.all += 1
        return super().inference(env_ids, timestep, state)

    def shared_inference(self, token, slot, rows):
        self.shared += 1
        return super().shared_inference(token, slot, rows)


def test_answers_in_shared_memory_equal_answers_over_courier():
    agent = PPO(PPOConfig(), OBSERVATION_SPEC, ACTION_SPEC)
    address, service = free_address(), CountedInferencer(agent, Learner(LearnerConfig(), agent, RecordingBuffer()))
    with serving(service, address), running(service):
        remote, plain = connect(address), resolve(client(address), "inferencer")
        for number, rows in enumerate([8, 8, 8, 5, 8, 3]):
            env_ids, timestep, _ = request(rows, number)
            output, state = remote.inference(env_ids, timestep, ())
            assert service.shared >= number  # greater if the client had to repeat a call
            expected, _ = plain.inference(env_ids, timestep, ())
            assert state == () and output.params_version == expected.params_version == 1
            jax.tree.map(np.testing.assert_array_equal, output, expected)
            assert output.action.dtype == expected.action.dtype and output.action.flags.writeable


def test_shared_calls_pass_state_and_larger_requests_get_larger_memory():
    address, service = free_address(), CountedInferencer()
    with serving(service, address), running(service):
        remote = connect(address)
        for number, rows in enumerate([2, 2, 30, 4]):
            _, state = remote.inference(*request(rows, number))
            np.testing.assert_array_equal(state["seen"], np.full(rows, number + 1.0))
        assert service.shared >= 3


def test_concurrent_calls_use_separate_slots():
    address, service = free_address(), CountedInferencer()
    with serving(service, address), running(service):
        remote = connect(address)
        remote.inference(*request(2))
        for start in (0, 100):
            calls = [(seed, AsyncCall(remote, "inference", request(2, seed))) for seed in range(start, start + 80)]
            for seed, call in calls:
                assert call.result()[1]["seen"].tolist() == [seed + 1.0] * 2
                assert call.done()
        # The memory has 64 slots, so some calls were sent over Courier. A busy machine repeats calls, so counts vary.
        assert 64 <= service.shared <= service.all - 2 and service.all >= 161


def test_concurrent_clients_get_their_own_answers():
    address, service = free_address(), CountedInferencer()
    wrong = []

    def ask(first):
        remote = connect(address)
        for seed in range(first, first + 50):
            _, state = remote.inference(*request(4, seed))
            if state["seen"].tolist() != [seed + 1.0] * 4:
                wrong.append((seed, state))

    with serving(service, address), running(service):
        threads = [threading.Thread(target=ask, args=(1000 * caller_index,)) for caller_index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
    assert not wrong and service.shared >= 8 * 49


def test_service_that_cannot_map_the_memory_receives_the_arrays():
    address, service = free_address(), CountedInferencer(finds=False)
    with serving(service, address), running(service):
        remote = connect(address)
        for number in range(3):
            assert remote.inference(*request(2, number))[1]["seen"].tolist() == [number + 1.0] * 2
        assert service.shared == 0 and service.all >= 3


class Answers:
    """A user's own inferencer. It has no other method than `inference`."""

    def inference(self, env_ids, timestep, state):
        from rlframe.types import AgentOutput

        return AgentOutput(np.zeros(len(env_ids), np.int32), {}, 7), state


def test_object_with_only_an_inference_method_receives_the_arrays():
    address = free_address()
    with serving(Answers(), address):
        remote = connect(address)
        assert [remote.inference(*request(2))[0].params_version for _ in range(3)] == [7, 7, 7]


def test_call_after_a_wrong_request_uses_shared_memory_again():
    address, service = free_address(), CountedInferencer()
    with serving(service, address), running(service):
        remote = connect(address)
        remote.inference(*request(2))
        env_ids, timestep, state = request(2)
        for wrong in (np.zeros((2, 5), np.float32), np.zeros((3, 2), np.float32)):
            with pytest.raises(UsageError, match=r"observation|rows"):
                remote.inference(env_ids, timestep._replace(observation=wrong), state)
        before = service.shared
        assert remote.inference(*request(2, 5))[1]["seen"].tolist() == [6.0, 6.0]
        assert service.shared > before


@pytest.mark.system
@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.system)])
def test_client_uses_another_service_after_a_kill_and_later_the_restarted_service(asynchronous):
    addresses = [free_address() for _ in range(2)]

    def ask(remote):
        call = AsyncCall(remote, "inference", request(2)) if asynchronous else None
        output, state = call.result() if call is not None else remote.inference(*request(2))
        assert state["seen"].tolist() == [1.0, 1.0]
        return float(output.extras["w"][0])

    children = [Child(address, fixed_inferencer, w) for address, w in zip(addresses, (0.25, 0.75), strict=True)]
    try:
        for address in addresses:  # wait until each service answers
            connect(address).stats()
        remote, only = connect(*addresses), connect(addresses[0])
        assert [ask(remote) for _ in range(3)] == [ask(only) for _ in range(3)] == [0.25] * 3
        children[0].kill()
        assert [ask(remote) for _ in range(3)] == [0.75] * 3
        children[0].close()
        only._deadline = 0.5
        with pytest.raises(PeerError, match=rf"The inferencer at {addresses[0]} did not answer inference\(\) within"):
            ask(only)
        only._deadline = CHILD_DEADLINE
        children[0] = Child(addresses[0], fixed_inferencer, 0.5)
        assert [ask(only) for _ in range(3)] == [0.5] * 3
    finally:
        for one in children:
            one.close()


def test_late_answer_does_not_change_a_later_call():
    """After a timeout, the client uses new memory. A late answer is written to the old memory."""
    address, service = free_address(), CountedInferencer()
    with serving(service, address), running(service):
        remote = connect(address)
        remote.inference(*request(2))
        remote.inference(*request(2))
        connection = remote._clients[address]
        late = connection._write(request(2, 40))
        connection._memory = None  # what the client does after a timeout
        assert remote.inference(*request(2, 50))[1]["seen"].tolist() == [51.0, 51.0]
        call = connection._write(request(2, 60))
        service.shared_inference(*late.name)
        assert call.memory is not late.memory
        assert call.read(service.shared_inference(*call.name))[1]["seen"].tolist() == [61.0, 61.0]


def call_forever(address, connection):
    remote = connect(address)
    while True:
        remote.inference(*request(8))
        connection.send(os.getpid())


@pytest.mark.system
def test_memory_of_a_killed_client_is_released_and_other_clients_continue():
    address, service = free_address(), CountedInferencer()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=call_forever, args=(address, there))
    with serving(service, address), running(service):
        process.start()
        try:
            for _ in range(3):
                assert here.poll(CHILD_DEADLINE)
                here.recv()
        finally:
            process.kill()
            process.join(DEADLINE)
        remote = connect(address)
        for number in range(3):
            assert remote.inference(*request(2, number))[1]["seen"].tolist() == [number + 1.0] * 2
        (known,) = service._shared_calls._memories.values()
        assert known.name.creator.pid == os.getpid()


class LateParams(FixedParams):
    """A learner that returns no parameters until `free` is set."""

    def __init__(self):
        super().__init__({"w": np.float32(0.5)})
        self.free = threading.Event()

    def get_params(self, known_version=-1):
        assert self.free.wait(DEADLINE)
        return super().get_params(known_version)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_client_waits_for_a_service_without_parameters_and_courier_prints_no_traceback(
    asynchronous, monkeypatch, capfd
):
    monkeypatch.setattr("rlframe.inferencers.inferencer.TIMEOUT", 0.1)
    asked, learner, address = [], LateParams(), free_address()

    class Asked(CountedInferencer):
        def is_ready(self, timeout):
            asked.append(super().is_ready(0.05))
            if len(asked) == 3:
                learner.free.set()
            return asked[-1]

    service = Asked(learner=learner)
    with serving(service, address), running(service):
        wait_until(lambda: service._batcher is not None)
        remote = connect(address)
        answer = AsyncCall(remote, "inference", request(2)).result() if asynchronous else remote.inference(*request(2))
        assert answer[1]["seen"].tolist() == [1.0, 1.0]
    assert asked[:2] == [False, False] and asked[-1]
    assert "Traceback" not in capfd.readouterr().err


def test_restarted_service_refuses_calls_in_unmapped_memory():
    assert "has not mapped the memory of this call" in CountedInferencer().shared_inference(1, 2, 3)


def test_stopped_service_refuses_shared_calls(capfd):
    address, service = free_address(), CountedInferencer()
    with serving(service, address):
        remote = connect(address)
        with running(service):
            for _ in range(2):
                remote.inference(*request(2))
        remote._deadline = 1.0
        with pytest.raises((PeerError, UnavailableError), match="has stopped"):
            remote.inference(*request(2))
    assert "Traceback" not in capfd.readouterr().err
