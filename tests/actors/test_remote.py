"""Tests of Actors with a remote inferencer: added steps, concurrent requests, and killed nodes."""

from __future__ import annotations

import functools
import threading
import time

import numpy as np
import pytest

from rlframe import AsyncEnv, SyncEnv
from rlframe.actors import Actor
from rlframe.errors import PeerError, UsageError
from rlframe.handles import resolve
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.types import AgentOutput
from tests.fakes import CountingEnv, FixedParams, RecordingBuffer, counting_agent
from tests.ports import free_address
from tests.serving import CHILD_DEADLINE, Child, client, fixed_inferencer, running, serving

DEADLINE = 60.0


class ConcurrentInferencer(Inferencer):
    """An Inferencer that records its largest number of concurrent calls. Each call first waits for `at_once` calls."""

    def __init__(self, at_once: int = 1) -> None:
        super().__init__(InferencerConfig(), counting_agent(), FixedParams({"w": np.float32(0.5)}))
        self.max_concurrent = 0
        self._at_once, self._concurrent, self._changed = at_once, 0, threading.Condition()

    def inference(self, env_ids, timestep, state):
        with self._changed:
            self._concurrent += 1
            self.max_concurrent = max(self.max_concurrent, self._concurrent)
            self._changed.notify_all()
            # Wait for less than the timeout of the call, so that the call is not repeated.
            self._changed.wait_for(lambda: self.max_concurrent >= self._at_once, 1.0)
        try:
            return super().inference(env_ids, timestep, state)
        finally:
            with self._changed:
                self._concurrent -= 1


class CountedBuffer(RecordingBuffer):
    """A buffer that sets the event `full` after `adds` calls of `add`."""

    def __init__(self, adds: int) -> None:
        super().__init__()
        self._adds, self.full = adds, threading.Event()

    def add(self, env_ids, step):
        super().add(env_ids, step)
        if len(self.steps) >= self._adds:
            self.full.set()


def async_actor(inferencer, buffer, wait_num=1):
    return Actor(lambda: AsyncEnv(CountingEnv, 4, wait_num, "thread"), inferencer, buffer)


def two_pools_actor(inferencer, buffer):
    return Actor(lambda: SyncEnv(CountingEnv, 2, "loop"), inferencer, buffer, num_pools=2)


@pytest.mark.parametrize("make", [async_actor, functools.partial(async_actor, wait_num=3), two_pools_actor])
def test_actor_with_a_remote_inferencer_adds_the_same_steps_as_with_a_local_inferencer(make):
    address, buffer = free_address(), CountedBuffer(40)
    service = ConcurrentInferencer()
    with serving(service, address), running(service):
        actor = make(client(address), buffer)
        with running(actor):
            assert buffer.full.wait(DEADLINE)
        actor.close()
    seen = 0
    for env in range(4):
        rows = [(step, list(ids).index(env)) for ids, step in buffer.steps if env in ids]
        seen += len(rows) >= 6
        for number, (step, row) in enumerate(rows):
            count = number % 4  # an episode has four timesteps, numbered from 0
            assert step.timestep.observation[row, 0] == count
            assert step.next_timestep.observation[row, 0] == (count + 1) % 4
            assert step.agent_state["seen"][row] == count
            assert np.broadcast_to(step.params_version, (len(step.timestep.step_type),))[row] == 1
    assert seen >= 1 and sum(len(ids) for ids, _ in buffer.steps) >= 40


@pytest.mark.parametrize("make", [async_actor, two_pools_actor])
def test_run_sends_the_next_inference_request_before_the_last_response(make):
    address, buffer = free_address(), CountedBuffer(10)
    service = ConcurrentInferencer(at_once=2)
    with serving(service, address), running(service):
        actor = make(client(address), buffer)
        with running(actor):
            assert buffer.full.wait(DEADLINE)
        actor.close()
    assert service.max_concurrent >= 2


def test_actor_with_a_remote_inferencer_writes_logs():
    class Logger(list):
        def write(self, step, values):
            self.append((step, values))

    address, buffer, logger = free_address(), CountedBuffer(8), Logger()
    service = ConcurrentInferencer()
    with serving(service, address), running(service):
        actor = Actor(CountingEnv, client(address), buffer, logger=logger)
        with running(actor):
            assert buffer.full.wait(DEADLINE)
        actor.close()
    assert logger[0] == (3, {"episode_return": 3.0, "episode_length": 3.0, "episodes": 1})


def test_one_call_of_step_steps_all_pools():
    buffer = RecordingBuffer()
    inferencer = Inferencer(InferencerConfig(), counting_agent(), FixedParams({"w": np.float32(0.5)}))
    actor = two_pools_actor(inferencer, buffer)
    assert actor.num_envs == 4 and buffer.segment == (0, 4)
    logs = [actor.step() for _ in range(3)]
    assert logs == [None, None, {"episode_return": 3.0, "episode_length": 3.0, "episodes": 4}]
    assert [list(ids) for ids, _ in buffer.steps[:2]] == [[0, 1], [2, 3]]
    with pytest.raises(UsageError, match="2 pools cannot save"):
        actor.get_state()
    actor.close()


def test_dead_inferencer_is_reported_by_run_within_the_deadline():
    address = free_address()
    actor = Actor(CountingEnv, client(address), RecordingBuffer(), deadline=1.0)
    began = time.monotonic()
    with pytest.raises(PeerError, match=rf"The inferencer at {address} did not answer initial_state\(\) within 1 s"):
        actor.run()
    assert time.monotonic() - began < 60.0
    actor.close()


def test_stop_ends_the_wait_for_a_dead_inferencer():
    actor = Actor(CountingEnv, client(free_address()), RecordingBuffer())
    with running(actor):
        pass
    actor.close()


@pytest.mark.system
def test_actor_switches_to_another_inferencer_when_the_first_one_is_killed():
    addresses, buffer = [free_address(), free_address()], CountedBuffer(10)
    children = [Child(address, fixed_inferencer, w) for address, w in zip(addresses, (0.25, 0.75), strict=True)]
    try:
        inferencers = [client(address) for address in addresses]
        for inferencer in inferencers:  # wait until both inferencers are running
            resolve(inferencer, "inferencer", deadline=CHILD_DEADLINE).stats()
        actor = Actor(CountingEnv, inferencers, buffer, rank=1, deadline=CHILD_DEADLINE)
        with running(actor):
            assert buffer.full.wait(CHILD_DEADLINE)
            children[1].kill()
            survived = len(buffer.steps) + 10
            buffer._adds = survived
            buffer.full.clear()
            assert buffer.full.wait(CHILD_DEADLINE)
        actor.close()
    finally:
        for child in children:
            child.close()
    used_params = [float(step.agent_output.extras["w"][0]) for _, step in buffer.steps]
    assert (used_params[0], used_params[-1]) == (0.75, 0.25)  # rank 1 starts with inferencer 1
    counts = [int(step.timestep.observation[0, 0]) for _, step in buffer.steps]
    assert counts == [number % 4 for number in range(len(counts))]  # the environments continued without a reset
    assert [float(step.agent_state["seen"][0]) for _, step in buffer.steps] == counts  # the agent states continued too


class OnlyInference:
    """An object that has only `inference`."""

    def inference(self, env_ids, timestep):
        return AgentOutput(np.zeros(len(env_ids), np.int32), {"w": np.full(len(env_ids), 0.5, np.float32)})


class OnlyAdds:
    def __init__(self):
        self.rewards = []

    def add(self, env_ids, step):
        self.rewards.append(float(step.next_timestep.reward.sum()))


class OnlyAddsData(OnlyAdds):
    def add(self, data):
        super().add(*data)


@pytest.mark.parametrize("make", [OnlyAdds, OnlyAddsData])
def test_actor_works_with_nodes_that_only_have_inference_and_add(make):
    addresses, buffer = [free_address(), free_address()], make()
    with serving(OnlyInference(), addresses[0]), serving(buffer, addresses[1]):
        actor = Actor(lambda: SyncEnv(CountingEnv, 2, "loop"), *map(client, addresses), rank=3)
        for _ in range(4):
            actor.step()
        assert (actor.rank, actor.env_steps) == (3, 6)
        assert buffer.rewards[:4] == [2.0, 2.0, 2.0, 0.0]
        actor.close()


def test_actor_needs_a_rank_for_a_remote_buffer_without_claim_rank():
    address = free_address()
    with serving(OnlyAdds(), address), pytest.raises(UsageError, match=r"no claim_rank\(\).*Actor\(\.\.\., rank=0\)"):
        Actor(lambda: SyncEnv(CountingEnv, 2, "loop"), OnlyInference(), client(address))
