"""Tests of the replay service: repeated calls, data loss, waits, and several shards."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
import types
from typing import Any

import numpy as np
import pytest

from rlframe.engines.threads import ThreadsEngine
from rlframe.errors import StoppedError, UsageError
from rlframe.handles import Remote
from rlframe.programs.run_dir.directory import RunDir
from rlframe.programs.topologies.heavy_env import HeavyEnv
from rlframe.programs.topologies.makers import add_service
from rlframe.replay import ReplayClosedError
from rlframe.replay.service import ReplayService, ServiceReplayBuffer, client
from rlframe.replay.service.server import SendBuffer, WriterId, unstack
from rlframe.testing.replay import add_experience
from rlframe.testing.streams import ReferenceReplay, StepStream, assert_batch_matches, fake_agent, first_ids
from rlframe.transport.sockets import SocketTransport
from rlframe.types import Sequence, Transition
from tests.waiting import wait_until


class Served:
    """A service, and a handle that calls this service through sockets."""

    def __init__(self, service: ReplayService) -> None:
        names = ("claim", "open", "add", "sample", "update_priorities", "forget_before", "stats")
        self.server = SocketTransport().serve({name: getattr(service, name) for name in names})
        self.handle = Remote([self.server.address], "replay service", transport=SocketTransport())


class RepeatedCalls:
    """Makes each call twice, as a transport can do after an error. Returns the second answer."""

    def __init__(self, service: ReplayService) -> None:
        self._service = service

    def __getattr__(self, name: str) -> Any:
        def twice(*args: Any) -> Any:
            getattr(self._service, name)(*args)
            return getattr(self._service, name)(*args)

        return twice


@pytest.mark.parametrize("kind", ["queue", "uniform"])
def test_a_call_that_is_made_twice_counts_once(kind):
    agent, reference, seen = fake_agent(kind, Transition(3), 4, 10_000), ReferenceReplay(Transition(3)), []
    buffer = ServiceReplayBuffer(agent, [RepeatedCalls(ReplayService(agent))])
    for _ in add_experience("broken fragments", buffer, reference, 60):
        while kind == "queue" and (batch := buffer.sample()) is not None:
            assert_batch_matches(batch, reference)
            seen += first_ids(batch).tolist()
    stats = buffer.stats()
    assert stats["added"] == len(reference.items)
    if kind == "queue":
        assert len(seen) == len(set(seen)) == stats["sampled"] and len(reference.items) - len(seen) < 4
    else:
        assert buffer.sample() is not None and buffer.stats()["sampled"] == 4
    buffer.close()


def test_items_are_added_and_sampled_correctly_through_a_transport():
    agent, reference = fake_agent("uniform", Sequence(5, period=2), 8, 10_000), ReferenceReplay(Sequence(5, period=2))
    served = Served(ReplayService(agent))
    buffer = pickle.loads(pickle.dumps(ServiceReplayBuffer(agent, [served.handle])))
    for _ in add_experience("subsets", buffer, reference, 40):
        pass
    assert buffer.stats()["added"] == len(reference.items)
    with buffer.make_dataset() as dataset:
        for _ in range(20):
            assert_batch_matches(next(dataset), reference)
    buffer.close()
    served.server.stop()


@pytest.mark.parametrize(
    "kind", [*(pytest.param(one, marks=pytest.mark.system) for one in ("uniform", "prioritized")), "queue"]
)
def test_items_of_two_shards_are_drawn_with_the_right_probabilities(kind):
    agent, reference, count = fake_agent(kind, Transition(1), 8, 10_000), ReferenceReplay(Transition(1)), 4_000
    buffer = ServiceReplayBuffer(agent, [ReplayService(agent, seed=shard) for shard in range(2)])
    for _ in add_experience("two writers", buffer, reference, 60):
        pass
    items = buffer.stats()["items"]
    assert items == len(reference.items)
    if kind == "queue":
        drawn = []
        while (batch := buffer.sample()) is not None:
            assert_batch_matches(batch, reference)
            drawn += first_ids(batch).tolist()
        assert len(drawn) == len(set(drawn)) >= items - 14
        return
    of_rank = np.zeros(2)
    for _ in range(count // 8):
        batch = buffer.sample()
        assert_batch_matches(batch, reference)
        np.testing.assert_allclose(batch.probabilities, 1 / items, rtol=1e-5)
        of_rank += np.bincount(batch.keys[:, 0], minlength=2)
    there = np.array([service.stats()["items"] for service in buffer._services])
    # The tolerance is four standard deviations for this number of batches.
    np.testing.assert_allclose(of_rank / count, there / items, atol=0.08)
    if kind == "prioritized":
        batch = buffer.sample()
        buffer.update_priorities(batch.keys, np.full(8, 5.0))
        assert buffer.stats()["dropped_priorities"] == 0
    buffer.close()


def test_batch_of_one_item_per_environment_needs_a_single_shard():
    agent = fake_agent("queue", Sequence(3), None, 1000)
    with pytest.raises(UsageError, match="use --replay-shards 1, got 2"):
        ServiceReplayBuffer(agent, [ReplayService(agent), ReplayService(agent)])


def test_writer_of_a_full_queue_waits_and_logs_the_reason(monkeypatch, caplog):
    monkeypatch.setattr(client, "_WARN_AFTER", 0.2)
    monkeypatch.setattr(client, "_MAX_STEPS", 4)
    agent = fake_agent("queue", Transition(1), 4, 40)
    service = ReplayService(agent)
    buffer = ServiceReplayBuffer(agent, [service])
    stream = StepStream(4, end=0.0)
    buffer.claim_rank(4)
    added = []

    def write() -> None:
        for _ in range(60):
            buffer.add(*stream.step())
            added.append(1)

    writer = threading.Thread(target=write)
    with caplog.at_level(logging.WARNING):
        writer.start()
        wait_until(
            lambda: "the queue is full with 40 items, because its reader is behind" in caplog.text, "No warning."
        )
    held = len(added)
    assert 10 <= held <= 20 and service.stats()["evicted"] == 0
    reader = ServiceReplayBuffer(agent, [service])
    taken = 0
    while taken < 236:  # the items of 59 steps of 4 environments; the writer adds 60 steps
        batch = reader.wait_for_batch(0.2)
        taken += 0 if batch is None else len(batch.keys)
    writer.join(20.0)
    assert not writer.is_alive() and service.stats()["evicted_unsampled"] == 0
    buffer.close()


def test_reader_does_not_wait_for_a_blocked_writer_of_the_same_buffer(monkeypatch):
    monkeypatch.setattr(client, "_MAX_STEPS", 8)
    agent = fake_agent("queue", Transition(1), 4, 40)
    buffer = ServiceReplayBuffer(agent, [ReplayService(agent)])
    stream, taken, added = StepStream(4, end=0.0), [], []
    buffer.claim_rank(4)

    def write() -> None:
        with contextlib.suppress(ReplayClosedError):
            while True:
                buffer.add(*stream.step())
                added.append(1)

    def read() -> None:
        while len(taken) < 100:
            if buffer.wait_for_batch(0.2) is not None:
                taken.append(buffer.stats()["items"])

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    wait_until(lambda: buffer._writers.by_rank[0]._held_back_reason, "The queue does not fill.")
    assert 10 <= len(added) <= 18  # 10 steps in the service, and at most 8 collected steps
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(20.0)
    assert not reader.is_alive(), f"only {len(taken)} batches came"
    buffer.close()
    writer.join(10.0)
    assert not writer.is_alive()


def test_add_returns_within_three_seconds_while_the_reader_is_slow():
    agent = fake_agent("queue", Transition(1), 4, 40)
    service, answered = ReplayService(agent), []
    stream = StepStream(4, end=0.0)
    ids, step = stream.step()
    send_buffer = SendBuffer(ids, step)
    send_buffer.put(step)
    for _ in range(39):
        step = stream.step()[1]._replace(timestep=step.next_timestep)
        send_buffer.put(step)
    rank, incarnation = service.claim(1, None)
    writer = WriterId(rank, incarnation, 4, 0)

    def send() -> None:
        delivered, why = service.add(writer, 0, [send_buffer.stack(40)])
        answered.append((delivered, why))

    sender, began = threading.Thread(target=send), time.monotonic()
    sender.start()
    number = 0
    while not answered and time.monotonic() < began + 10.0:  # the reader removes 4 items every 0.2 s
        sender.join(0.2)
        number += service.sample(0, number) is not None
    sender.join()
    assert time.monotonic() < began + 3.0, "the call took as long as the reader did"
    assert 10 <= answered[0][0] < 40 and "its reader is behind" in answered[0][1]


def test_new_writer_with_the_same_incarnation_is_not_a_repeated_call():
    agent = fake_agent("uniform", Transition(1), 4, 1000)
    service = ReplayService(agent)
    stream = StepStream(4, end=0.0)
    for _ in range(2):  # the service forgets the first writer, so both writers get incarnation 0
        buffer = ServiceReplayBuffer(agent, [service])
        service._buffer._incarnations.clear()
        assert buffer.claim_rank(4) == (0, 0)
        for _ in range(5):
            buffer.add(*stream.step())
        buffer.flush()
        buffer.close()
    assert service.stats()["steps"] == 2 * 5 * 4


def test_shard_without_writers_does_not_delay_batches_of_other_shards():
    agent = fake_agent("queue", Transition(1), 4, 1000)
    buffer = ServiceReplayBuffer(agent, [ReplayService(agent), ReplayService(agent)])
    buffer.claim_rank(4, 1)
    stream = StepStream(4, 1, end=0.0)
    for _ in range(21):
        buffer.add(*stream.step())
    began = time.monotonic()
    for _ in range(20):
        assert buffer.wait_for_batch(0.5) is not None
    assert time.monotonic() < began + 2.0  # if every second batch waited 0.5 s, this would take 5 s
    buffer.close()


def test_capacity_of_each_queue_shard_is_enough_for_a_whole_batch(tmp_path):
    agent = fake_agent("queue", Transition(1), 32, 1000)
    config = HeavyEnv(replay="service", replay_shards=4, grace_seconds=8.0)
    run = types.SimpleNamespace(
        topology_config=config,
        experiment=types.SimpleNamespace(seed=0, topology_config=config),
        agent=agent,
        directory=RunDir(tmp_path),
    )
    buffer = add_service(ThreadsEngine(), run, 40, num_envs=4)
    buffer.claim_rank(4)
    stream = StepStream(4, end=0.0)
    for _ in range(9):
        buffer.add(*stream.step())
    batch = buffer.sample()
    assert batch is not None and len(batch.keys) == 32
    buffer.close()


def test_restored_queue_does_not_contain_sampled_items(tmp_path):
    agent = fake_agent("queue", Transition(1), 4, 40)
    service = ReplayService(agent, tmp_path)
    buffer = ServiceReplayBuffer(agent, [service])
    service._save()  # without a writer, `_save` saves nothing and logs no warning
    assert not list(tmp_path.iterdir())
    buffer.claim_rank(4)
    stream = StepStream(4, end=0.0)
    buffer.add(*stream.step())
    buffer.flush()
    service._save()
    assert ReplayService(agent, tmp_path).stats()["items"] == 4
    assert buffer.sample() is not None
    service._save()
    assert ReplayService(agent, tmp_path).stats()["items"] == service.stats()["items"] == 0
    buffer.close()


def test_restarted_service_never_gives_an_incarnation_again(tmp_path):
    agent = fake_agent("uniform", Transition(1), 8, 400)

    def start(num_shards):
        return [ReplayService(agent, tmp_path / f"{shard}-of-{num_shards}") for shard in range(num_shards)]

    # One service dies together with an actor, before its first checkpoint.
    assert [ServiceReplayBuffer(agent, start(1)).claim_rank(2, 0) for _ in range(3)] == [(0, 0), (0, 1), (0, 2)]
    # Shard 0 dies. Actor 1, on shard 1, restarts after that.
    services = start(2)
    buffer = ServiceReplayBuffer(agent, services)
    assert [buffer.claim_rank(2, 1) for _ in range(3)] == [(1, 0), (1, 1), (1, 2)]
    buffer.add(*StepStream(2, 1).step())
    buffer.flush()
    services[0] = start(2)[0]
    assert ServiceReplayBuffer(agent, services).claim_rank(2, 1) == (1, 3)
    buffer.close()


def test_waiting_writer_of_a_service_stops_after_end_waits(monkeypatch):
    monkeypatch.setattr(client, "_MAX_STEPS", 2)
    agent = fake_agent("uniform", Transition(1), 4, 1000, samples_per_insert=1.0)
    buffer = ServiceReplayBuffer(agent, [ReplayService(agent, run_ahead=8)])
    stream, stopped = StepStream(4, end=0.0), threading.Event()
    rank, _ = buffer.claim_rank(4)

    def write() -> None:
        try:
            while True:
                buffer.add(*stream.step())
        except StoppedError as error:
            assert "Writer 0 was stopped while" in str(error)
            stopped.set()

    threading.Thread(target=write, daemon=True).start()
    wait_until(lambda: buffer._writers.by_rank[rank]._held_back_reason, "The writer does not wait.")
    assert not stopped.is_set() and buffer._services[0].stats()["added"] <= 20
    buffer.end_waits(rank)
    assert stopped.wait(10.0)
    buffer.close()
    with pytest.raises(ReplayClosedError):
        buffer.add(*stream.step())


def test_new_service_continues_from_the_checkpoint(tmp_path):
    agent, reference = fake_agent("uniform", Transition(3), 8, 10_000), ReferenceReplay(Transition(3))
    first = ReplayService(agent, tmp_path)
    handles = [first]
    buffer = ServiceReplayBuffer(agent, handles)
    for _ in add_experience("lockstep", buffer, reference, 30):
        pass
    before = buffer.stats()["added"]
    assert before == len(reference.items)
    first._save()
    stream = StepStream(6, 0, seed=1)
    for _ in range(5):  # these steps are lost when the service is replaced
        buffer.add(*stream.step())
    buffer.flush()
    second = ReplayService(agent, tmp_path)
    assert second.stats()["added"] == before
    buffer._services = [second]
    sender = buffer._writers.by_rank[0]
    sender._service = second
    for _ in range(4):
        buffer.add(*stream.step())
    stats = buffer.stats()
    # The lost steps leave a gap. An item cannot span the gap, so only items within these four steps are added.
    assert before < stats["added"] < before + 4 * 6
    assert buffer.claim_rank(6) == (1, 0) and buffer.claim_rank(6, 0) == (0, 1)
    buffer.close()


def test_writer_stops_after_another_writer_claims_its_rank():
    agent = fake_agent("uniform", Transition(1), 4, 1000)
    service = ReplayService(agent)
    old, new = ServiceReplayBuffer(agent, [service]), ServiceReplayBuffer(agent, [service])
    stream = StepStream(4, end=0.0)
    assert old.claim_rank(4) == (0, 0)
    old.add(*stream.step())
    old.flush()
    assert new.claim_rank(4, 0) == (0, 1)
    new.add(*stream.step())
    new.flush()
    with pytest.raises(StoppedError, match="Rank 0 was claimed again"):
        old.add(*stream.step())
        old.flush()


def test_stack_contains_each_observation_once():
    stream = StepStream(3, end=0.0)
    steps = [stream.step() for _ in range(5)]
    ids = steps[0][0]
    steps = [step for _, step in steps]
    for i in range(1, 5):  # make the steps consecutive, like the steps of an Actor
        steps[i] = steps[i]._replace(timestep=steps[i - 1].next_timestep)
    send_buffer = SendBuffer(ids, steps[0])
    for step in steps:
        assert send_buffer.accepts(ids, step)
        send_buffer.put(step)
    assert not send_buffer.accepts(ids, steps[0]) and not send_buffer.accepts(ids[:2], steps[0])
    stack = send_buffer.stack(5)
    assert stack.timesteps.reward.shape == (6, 3)
    send_buffer.delivered = 3
    for first, back in (
        (0, list(unstack(stack))),
        (3, list(unstack(stack, 3))),
        (3, list(unstack(send_buffer.stack(5)))),
    ):
        assert len(back) == 5 - first
        for step, same in zip(steps[first:], back):
            np.testing.assert_array_equal(same.timestep.observation["id"], step.timestep.observation["id"])
            np.testing.assert_array_equal(same.next_timestep.observation["id"], step.next_timestep.observation["id"])
            assert same.params_version == step.params_version
