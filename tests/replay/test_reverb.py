"""Tests with a Reverb server that restarts, does not answer, blocks its writers, or has several writers."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe.actors import Actor
from rlframe.envs import SyncEnv
from rlframe.errors import CheckpointError, PeerError, StoppedError, UsageError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.learners import Learner, LearnerConfig
from rlframe.replay import ReplayClosedError
from rlframe.replay.reverb import ReverbReplayBuffer, connection
from rlframe.testing.streams import STEP_SPEC, ReferenceReplay, StepStream, assert_batch_matches, fake_agent, first_ids
from rlframe.types import AgentSpecs, Sequence, Transition
from tests.extras import needs
from tests.fakes import CountingEnv, FixedParams, counting_agent
from tests.ports import free_port
from tests.replay.factories import servers
from tests.replay.reverb_servers import Servers
from tests.waiting import wait_until

Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that starts a server with tables and returns its address. The servers stop after the test."""
    needs("reverb")
    started: list[str] = []

    def start(tables: Any) -> str:
        started.append(servers().start(tables))
        return started[-1]

    yield start
    for address in started:
        servers().stop(address)


@pytest.fixture
def own_process() -> Iterator[Callable[[], Servers]]:
    """Return a function that starts a separate process for servers, which the test may kill."""
    needs("reverb")
    made: list[Servers] = []

    def make() -> Servers:
        made.append(Servers())
        return made[-1]

    yield make
    for process in made:
        process.process.kill()
        process.close()


@contextlib.contextmanager
def buffer_of(agent: Any, address: str, **options: Any) -> Iterator[ReverbReplayBuffer]:
    buffer = ReverbReplayBuffer(agent, address, **options)
    try:
        yield buffer
    finally:
        began = time.monotonic()
        buffer.close()
        assert time.monotonic() - began < 30.0


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run `function` in a thread. Return the thread, and a list for the function's result or error."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def is_adding(buffer: ReverbReplayBuffer) -> bool:
    if buffer._writer._lock.acquire(blocking=False):
        buffer._writer._lock.release()
        return False
    return True


# --- a server that restarts


@pytest.mark.system
def test_restarted_server_has_the_items_of_its_checkpoint(own_process: Any, tmp_path: Path) -> None:
    agent, stream, reference = (
        fake_agent("uniform", Transition(1), 8, 1000),
        StepStream(4, end=0.0),
        ReferenceReplay(Transition(1)),
    )
    tables, first = ReverbReplayBuffer.tables(agent), own_process()
    address = first.start(tables, checkpoints=tmp_path / "server")
    port = int(address.rpartition(":")[2])
    with buffer_of(agent, address, timeout=60.0) as buffer:
        assert buffer.claim_rank(4) == (0, 0)
        reference.claim_rank(4, 0)

        def step() -> None:
            ids, step = stream.step()
            reference.add(ids, step)
            buffer.add(ids, step)

        for _ in range(5):
            step()
        buffer.save(tmp_path / "replay")
        dataset = buffer.make_dataset()
        assert_batch_matches(next(dataset), reference)
        first.kill()
        adding, _ = in_thread(step)  # the thread waits in `add` until the server is reachable again
        second = own_process()
        second.start(tables, port, tmp_path / "server")
        adding.join(timeout=60.0)
        assert not adding.is_alive()
        buffer.restore(tmp_path / "replay")
        assert buffer.size == buffer.stats()["added"] == 24
        while len({first for _ in range(20) for first in first_ids(buffer.sample()).tolist()}) < 24:
            pass
        assert_batch_matches(buffer.sample(), reference)
        for _ in range(20):  # the dataset continues with the new server
            assert_batch_matches(next(dataset), reference)
        assert buffer.claim_rank(4) == (1, 0)  # the checkpoint includes the ranks
        dataset.close()


@pytest.mark.system
def test_restore_raises_if_the_server_restarted_without_its_items(own_process: Any, tmp_path: Path) -> None:
    agent, stream = fake_agent("uniform", Transition(1), 8, 1000), StepStream(4, end=0.0)
    tables, first = ReverbReplayBuffer.tables(agent), own_process()
    address = first.start(tables)
    with buffer_of(agent, address, timeout=60.0) as buffer, buffer_of(agent, address) as other:
        buffer.claim_rank(4)
        buffer.add(*stream.step())
        buffer.save(tmp_path / "replay")
        first.kill()
        own_process().start(tables, int(address.rpartition(":")[2]))
        with pytest.raises(CheckpointError, match="has received 0 items, but .* after 4"):
            buffer.restore(tmp_path / "replay")
        buffer.add(*stream.step())
        assert other.claim_rank(4) == (1, 0)  # the first buffer has registered its claim of rank 0 with the new server


@pytest.mark.parametrize("silent", ["no answer", pytest.param("no listener", marks=pytest.mark.system)])
def test_error_contains_the_address_of_a_server_that_never_answers(silent: str) -> None:
    needs("reverb")
    connection.import_reverb()  # import TensorFlow before the test measures time
    port = free_port()
    address = f"127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        if silent != "no listener":
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        with buffer_of(fake_agent("uniform", Transition(1), 8, 1000), address, timeout=1.0) as buffer:
            for call in (buffer.claim_rank, buffer.sample, lambda: buffer.size, buffer.make_dataset):
                began = time.monotonic()
                with pytest.raises(PeerError, match=rf"server at {address} did not answer \w+ for \d+ s"):
                    call()
                assert time.monotonic() - began < 30.0


@pytest.mark.system
def test_error_of_a_dead_server_contains_the_name_of_the_call(own_process: Any) -> None:
    agent, stream = fake_agent("prioritized", Transition(1), 8, 1000), StepStream(4, end=0.0)
    process = own_process()
    address = process.start(ReverbReplayBuffer.tables(agent))
    with buffer_of(agent, address) as buffer:
        buffer.claim_rank(4)
        buffer.add(*stream.step())
        keys, dataset = buffer.sample().keys, buffer.make_dataset()
        next(dataset)
        process.kill()
        buffer._connection.timeout = 0.5
        calls = {
            "add": lambda: buffer.add(*stream.step()),
            "sample": buffer.sample,
            "update_priorities": lambda: buffer.update_priorities(keys, np.ones(8)),
            "checkpoint": lambda: buffer.save("/nonexistent"),
            "claim_rank": buffer.claim_rank,
        }
        for name, call in calls.items():
            with pytest.raises(PeerError, match=f"did not answer {name}"):
                call()
        with pytest.raises(PeerError, match="did not answer sample"):
            for _ in range(100):
                next(dataset)


# --- waiting and stopping


def test_close_ends_a_waiting_reader(serve: Serve) -> None:
    agent = fake_agent("uniform", Transition(1), 8, 1000)
    with buffer_of(agent, serve(ReverbReplayBuffer.tables(agent))) as buffer:
        assert buffer.sample() is None
        dataset = buffer.make_dataset()
        reading, result = in_thread(lambda: list(dataset))
        wait_until(lambda: dataset._samplers is not None)
        dataset.close()
        reading.join(timeout=30.0)
        assert result == [[]]
        assert not dataset._thread.is_alive()


def test_writer_of_a_full_queue_waits_for_the_reader(serve: Serve) -> None:
    agent, stream, reference = (
        fake_agent("queue", Transition(1), 4, 8),
        StepStream(4, end=0.0),
        ReferenceReplay(Transition(1)),
    )
    with buffer_of(agent, serve(ReverbReplayBuffer.tables(agent)), patience=5.0) as buffer:
        buffer.claim_rank(4)
        reference.claim_rank(4, 0)

        def step() -> None:
            ids, step = stream.step()
            reference.add(ids, step)
            buffer.add(ids, step)

        for _ in range(2):
            step()
        with pytest.raises(PeerError, match="blocked add.*'replay' is full"):
            step()
        seen = [first for _ in range(3) for first in first_ids(buffer.sample()).tolist()]
        assert seen == list(reference.items)  # the blocked items were not lost
        for _ in range(2):
            step()
        adding, result = in_thread(step)
        buffer.close()
        adding.join(timeout=30.0)
        assert isinstance(result[0], ReplayClosedError)


def test_queue_smaller_than_a_batch_does_not_block(serve: Serve) -> None:
    agent, stream = fake_agent("queue", Transition(1), 12, 8), StepStream(4, end=0.0)
    with buffer_of(agent, serve(ReverbReplayBuffer.tables(agent)), patience=5.0) as buffer:
        buffer.claim_rank(4)
        for _ in range(2):
            buffer.add(*stream.step())
            assert buffer.sample() is None
        buffer.add(*stream.step())
        assert len(set(first_ids(buffer.sample()))) == 12


def test_samples_per_insert_blocks_writers_of_a_reverb_server(serve: Serve) -> None:
    agent = fake_agent("uniform", Transition(1), 4, 1000, min_size=4, samples_per_insert=1.0)
    with buffer_of(agent, serve(ReverbReplayBuffer.tables(agent, run_ahead=12)), patience=5.0) as buffer:
        buffer.claim_rank(4)
        stream = StepStream(4, end=0.0)
        for _ in range(4):
            buffer.add(*stream.step())
        with pytest.raises(PeerError, match="sampled less than samples_per_insert"):
            buffer.add(*stream.step())
        assert buffer.sample() is not None
        wait_until(lambda: buffer.stats()["added"] == 20)


def test_blocked_writer_stops_after_end_waits(serve: Serve) -> None:
    agent, streams = fake_agent("queue", Transition(1), 4, 8), [StepStream(4, rank, end=0.0) for rank in range(2)]
    with buffer_of(agent, serve(ReverbReplayBuffer.tables(agent))) as buffer:
        assert [buffer.claim_rank(4)[0] for _ in range(2)] == [0, 1]
        for _ in range(2):
            buffer.add(*streams[0].step())
        held, result = in_thread(lambda: buffer.add(*streams[0].step()))
        wait_until(lambda: is_adding(buffer))
        behind, other = in_thread(lambda: buffer.add(*streams[1].step()))  # this call waits until the blocked call ends
        for rank, thread in ((1, behind), (0, held)):
            assert thread.is_alive()
            buffer.end_waits(rank)
            thread.join(timeout=30.0)
        assert "while it waited for another writer" in str(other[0])
        assert re.search(r"add was stopped after it had waited \d", str(result[0]))
        assert all(type(error) is StoppedError for error in (*result, *other))
        seen: list[int] = []
        wait_until(lambda: (batch := buffer.sample()) is not None and len(seen.extend(first_ids(batch)) or seen) == 12)
        assert len(set(seen)) == 12  # no item is lost, even if its arrival was not confirmed
        assert buffer.claim_rank(4, rank=0) == (0, 1)  # a restarted actor can add steps
        buffer.add(*StepStream(4, 0, end=0.0).step())


def test_actor_stops_while_a_full_queue_blocks_it(serve: Serve) -> None:
    spec = dataclasses.replace(counting_agent().replay_spec, kind="queue", batch_size=2, capacity=4)
    agent = AgentSpecs(spec, counting_agent().step_spec)
    with buffer_of(agent, serve(ReverbReplayBuffer.tables(agent))) as buffer:
        inferencer = Inferencer(InferencerConfig(), counting_agent(), FixedParams({"w": np.float32(0.0)}))
        actor = Actor(lambda: SyncEnv(CountingEnv, 2, "loop"), inferencer, buffer)
        acting, result = in_thread(actor.run)
        wait_until(lambda: buffer.size == 4 and is_adding(buffer))
        actor.stop()
        acting.join(timeout=30.0)
        assert result == [None]
        actor.close()


@pytest.mark.system
def test_end_waits_stops_a_writer_that_waits_for_a_dead_server(own_process: Any) -> None:
    agent, stream, process = fake_agent("prioritized", Transition(1), 8, 1000), StepStream(4, end=0.0), own_process()
    with buffer_of(agent, process.start(ReverbReplayBuffer.tables(agent))) as buffer:
        buffer.claim_rank(4)
        buffer.add(*stream.step())
        process.kill()
        adding, result = in_thread(lambda: buffer.add(*stream.step()))
        buffer.end_waits(0)
        adding.join(timeout=30.0)
        assert type(result[0]) is StoppedError


def test_repeated_claim_continues_an_interrupted_claim(serve: Serve, monkeypatch: Any) -> None:
    agent = fake_agent("queue", Sequence(2), None, 1000)
    with buffer_of(agent, serve(ReverbReplayBuffer.tables(agent))) as buffer:
        registry = buffer._registry
        for rank in (None, None, 0):
            append = registry._append

            def lose(entry: list[int], append: Any = append) -> None:
                append(entry)
                raise PeerError("the answer was lost")

            with monkeypatch.context() as patch:
                patch.setattr(registry, "_append", lose)
                with pytest.raises(PeerError, match="answer was lost"):
                    buffer.claim_rank(rank=rank)
            before = sorted(registry._read())
            claimed = buffer.claim_rank(rank=rank)
            assert sorted(registry._read()) == before  # the registry has no second claim
        assert claimed == (0, 1)
        for _ in range(3):
            buffer.open_segment(0, 3)
        assert buffer.batch_size() == 3


# --- blocks


@pytest.mark.parametrize("scenario", ["lockstep", "broken"])
def test_queue_of_blocks_returns_the_same_items_as_a_queue_of_single_items(serve: Serve, scenario: str) -> None:
    item = Sequence(3, period=2)
    agent, stream, reference, seen = fake_agent("queue", item, 5, 2000), StepStream(6), ReferenceReplay(item), []
    with buffer_of(agent, serve(ReverbReplayBuffer.tables(agent, block=3))) as buffer:
        buffer.claim_rank(6)
        reference.claim_rank(6, 0)
        for t in range(30):
            if scenario == "broken" and t % 7 == 6:
                stream.restart(np.array([1, 4]), unless_first=True)
            ids, step = stream.step()
            buffer.add(ids, step)
            reference.add(ids, step)
            if scenario == "lockstep":
                assert buffer.size == len(reference.items) - len(seen)
            while (batch := buffer.sample()) is not None:
                assert_batch_matches(batch, reference)
                seen += first_ids(batch).tolist()
        assert len(seen) == len(set(seen)) == len(reference.items) // 5 * 5
        assert len(seen) > 50
        position = {first: i for i, first in enumerate(reference.items)}
        assert max(abs(position[first] - i) for i, first in enumerate(seen)) < 6


def test_block_size_that_does_not_fit_the_writer_or_the_kind_is_refused(serve: Serve) -> None:
    agent = fake_agent("queue", Sequence(2), 4, 100)
    with buffer_of(agent, serve(ReverbReplayBuffer.tables(agent, block=4))) as buffer:
        with pytest.raises(UsageError, match="a block that divides 6"):
            buffer.claim_rank(6)
        assert buffer.claim_rank(8) == (1, 0)
    with pytest.raises(UsageError, match="draws single items"):
        ReverbReplayBuffer.tables(fake_agent("uniform", Transition(1), 4, 100), block=2)


# --- several clients of one server


def test_concurrent_claims_get_different_ranks_and_incarnations(serve: Serve) -> None:
    agent = fake_agent("uniform", Transition(1), 8, 1000)
    address = serve(ReverbReplayBuffer.tables(agent))
    with contextlib.ExitStack() as stack:
        buffers = [stack.enter_context(buffer_of(agent, address)) for _ in range(6)]
        claims = [in_thread(buffer.claim_rank) for buffer in buffers]
        for thread, _ in claims:
            thread.join(timeout=60.0)
        assert sorted(result for _, [result] in claims) == [(rank, 0) for rank in range(6)]
        claims = [in_thread(lambda buffer=buffer: buffer.claim_rank(rank=2)) for buffer in buffers]
        for thread, _ in claims:
            thread.join(timeout=60.0)
        incarnations = [result[1] for _, [result] in claims]
        assert len(set(incarnations)) == 6
        assert min(incarnations) > 0


def test_batch_has_one_item_of_each_environment_of_each_writer(serve: Serve) -> None:
    agent = fake_agent("queue", Sequence(2), None, 1000)
    address = serve(ReverbReplayBuffer.tables(agent))
    with buffer_of(agent, address) as a, buffer_of(agent, address) as b, buffer_of(agent, address) as reader:
        streams = StepStream(3, rank=0, end=0.0), StepStream(5, rank=1, end=0.0)
        assert (a.claim_rank(3), b.claim_rank(5)) == ((0, 0), (1, 0))
        dataset = reader.make_dataset()  # the batch size is the number of environments that are known now
        for buffer, stream in zip((a, b), streams):
            for _ in range(2):
                buffer.add(*stream.step())
        batch = next(dataset)
        assert sorted(batch.keys[:, 0].tolist()) == [0] * 3 + [1] * 5
        dataset.close()


def test_new_items_get_the_highest_priority_that_another_process_has_set(serve: Serve) -> None:
    agent = fake_agent("prioritized", Transition(1), 4, 1000, priority_exponent=1.0)
    address = serve(ReverbReplayBuffer.tables(agent))
    with buffer_of(agent, address) as writer, buffer_of(agent, address) as learner:
        stream = StepStream(1, end=0.0)
        writer.claim_rank(1)
        writer.add(*stream.step())
        learner.update_priorities(learner.sample().keys[:1], np.array([3.0]))
        writer.add(*stream.step())
        np.testing.assert_allclose(learner.sample().probabilities, 0.5)


def test_actor_and_learner_accept_a_reverb_client(serve: Serve) -> None:
    import reverb

    agent = counting_agent()
    client = reverb.Client(serve(ReverbReplayBuffer.tables(agent)))
    learner = Learner(LearnerConfig(max_learner_steps=3), agent, client)
    inferencer = Inferencer(InferencerConfig(), agent, FixedParams({"w": np.float32(0.0)}))
    actor = Actor(lambda: SyncEnv(CountingEnv, 2, "loop"), inferencer, client)
    assert (actor.rank, actor.incarnation) == (0, 0)
    for _ in range(4):
        actor.step()
    learner.run()
    assert learner.learner_steps == 3
    assert float(learner.get_params()[1]["w"]) > 0.5  # each reward is 1
    actor.close()
    learner.close()


def test_learner_stops_while_it_waits_for_its_first_batch(serve: Serve) -> None:
    import reverb

    agent = counting_agent()
    learner = Learner(LearnerConfig(), agent, reverb.Client(serve(ReverbReplayBuffer.tables(agent))))
    running, result = in_thread(learner.run)
    wait_until(lambda: learner._replay._dataset is not None)
    learner.stop()
    running.join(timeout=30.0)
    assert result == [None]
    learner.close()


@pytest.mark.system
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_learner_that_is_blocked_in_update_priorities_can_stop_and_save(
    own_process: Any, tmp_path: Path, how: signal.Signals
) -> None:
    import reverb

    agent, process = counting_agent(prioritized=True), own_process()
    client = reverb.Client(process.start(ReverbReplayBuffer.tables(agent)))
    learner = Learner(LearnerConfig(checkpoint_dir=str(tmp_path)), agent, client)
    inferencer = Inferencer(InferencerConfig(), agent, FixedParams({"w": np.float32(0.0)}))
    actor = Actor(lambda: SyncEnv(CountingEnv, 2, "loop"), inferencer, client)
    for _ in range(4):
        actor.step()
    actor.close()
    buffer = learner._replay.buffer
    batch = buffer.sample()
    process.process.send_signal(how)
    buffer.make_dataset = lambda: (each for each in [batch])  # this batch was drawn before the server was stopped
    running, result = in_thread(learner.run)
    wait_until(lambda: learner.learner_steps == 1)
    learner.stop()
    running.join(timeout=30.0)
    assert result == [None]
    assert (tmp_path / "1").is_dir()
    learner.close()


def test_queue_dataset_returns_each_item_once_and_in_order(serve: Serve) -> None:
    agent, stream, reference = (
        fake_agent("queue", Transition(2), 5, 1000),
        StepStream(3),
        ReferenceReplay(Transition(2)),
    )
    address = serve(ReverbReplayBuffer.tables(agent))
    with buffer_of(agent, address) as writer, buffer_of(agent, address) as reader:
        writer.claim_rank(3)
        reference.claim_rank(3, 0)
        with reader.make_dataset() as dataset:
            for _ in range(40):
                ids, step = stream.step()
                writer.add(ids, step)
                reference.add(ids, step)
            seen: list[int] = []
            while len(seen) + 5 <= len(reference.items):
                batch = next(dataset)
                assert_batch_matches(batch, reference)
                seen += first_ids(batch).tolist()
        position = {first: i for i, first in enumerate(reference.items)}
        assert len(set(seen)) == len(seen)
        assert max(abs(position[first] - i) for i, first in enumerate(seen)) <= 3 * 2


# --- arguments


def test_tables_can_be_pickled_called_and_iterated_over(serve: Serve) -> None:
    import launchpad as lp
    import reverb

    agent = fake_agent("prioritized", Transition(1), 4, 100, priority_exponent=0.7)
    tables = pickle.loads(pickle.dumps(ReverbReplayBuffer.tables(agent, capacity=50)))
    node = lp.ReverbNode(tables)
    infos = {table.name: table.info for table in node._priority_tables_fn()}
    assert infos["replay"].max_size == 50
    assert infos["replay"].sampler_options.prioritized.priority_exponent == pytest.approx(0.7)
    assert infos["replay"].signature["rows"].shape == (1, _row_bytes(agent))
    server = reverb.Server(tables)  # `Server` iterates over the tables
    server.stop()


def test_table_of_another_agent_is_refused(serve: Serve) -> None:
    address = serve(ReverbReplayBuffer.tables(fake_agent("queue", Sequence(4), 4, 100)))
    with (
        buffer_of(fake_agent("queue", Sequence(5), 4, 100), address) as buffer,
        pytest.raises(
            UsageError, match=r"item is Sequence\(length=4, period=4\) there, Sequence\(length=5, period=5\)"
        ),
    ):
        buffer.claim_rank(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacty": 5}, "Did you mean 'capacity'"),
        ({"block": 0}, "at least one item"),
        ({"when_full": "block"}, "'wait' or 'drop'"),
        ({"samples_per_insert": 2.0}, "returns each item once"),
    ],
)
def test_invalid_options_of_tables_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ReverbReplayBuffer.tables(fake_agent("queue", Sequence(4), 4, 100), **options)


def test_copy_of_a_pickled_reverb_buffer_uses_the_same_server(serve: Serve) -> None:
    agent, stream = fake_agent("uniform", Transition(1), 4, 100), StepStream(2, end=0.0)
    with buffer_of(agent, serve(ReverbReplayBuffer.tables(agent))) as buffer:
        copy = pickle.loads(pickle.dumps(buffer))
        assert buffer.claim_rank(2) == (0, 0)
        assert copy.claim_rank(2) == (1, 0)
        buffer.add(*stream.step())
        assert copy.size == 2
        copy.close()


def _row_bytes(agent: Any) -> int:
    from rlframe.replay.reverb.item_bytes import ItemRows
    from rlframe.types import AgentSpecs

    return ItemRows(AgentSpecs(agent.replay_spec, STEP_SPEC)).nbytes
