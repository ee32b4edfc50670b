"""Tests of `SamplerPool`, which uses several samplers for one server."""

from __future__ import annotations

import threading

import pytest

from rlframe.replay.reverb import ReverbReplayBuffer
from rlframe.testing.streams import ReferenceReplay, StepStream, assert_batch_matches, fake_agent
from rlframe.types import Transition
from tests.replay.factories import servers
from tests.waiting import wait_until


@pytest.fixture
def stop_servers():
    started: list[str] = []
    yield started
    for address in started:
        servers().stop(address)


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_samplers_return_a_whole_batch_if_the_rate_limiter_allows_exactly_one(kind, stop_servers):
    """No sampler keeps a draw that a waiting batch needs."""
    agent = fake_agent(kind, Transition(1), 8, 1000, min_size=8, samples_per_insert=1.0)
    stop_servers.append(servers().start(ReverbReplayBuffer.tables(agent)))
    buffer, stream, reference = (
        ReverbReplayBuffer(agent, stop_servers[0]),
        StepStream(4, end=0.0),
        ReferenceReplay(Transition(1)),
    )
    buffer.claim_rank(4)
    reference.claim_rank(4, 0)
    dataset = buffer.make_dataset(timeout=30.0)
    for round_ in range(1, 6):
        for _ in range(2):
            ids, step = stream.step()
            reference.add(ids, step)
            buffer.add(ids, step)
        assert_batch_matches(next(dataset), reference)
        assert buffer.stats()["sampled"] == 8 * round_
    buffer.close()


@pytest.mark.parametrize("number", [1, 3])
def test_close_ends_the_threads_while_samplers_are_waiting(number, stop_servers):
    agent = fake_agent("uniform", Transition(1), 8, 1000)
    stop_servers.append(servers().start(ReverbReplayBuffer.tables(agent)))
    buffer = ReverbReplayBuffer(agent, stop_servers[0])
    dataset = buffer.make_dataset(threads=number)

    def threads() -> int:
        return sum(thread.name == "rlframe reverb sampler" for thread in threading.enumerate())

    wait_until(lambda: threads() == number)
    dataset.close()
    assert not threads(), "threads outlive their dataset"
    buffer.close()
