"""Tests of the shared-memory buffer with real processes. They run at full speed, or are stopped or killed."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe.errors import UsageError
from rlframe.replay import SharedMemReplayBuffer, tree_store
from rlframe.replay.shared_memory import block, segment_writers
from rlframe.replay.shared_memory.block import BufferGoneError
from rlframe.replay.shared_memory.segment_writers import WriterTimeoutError
from rlframe.testing.streams import ReferenceReplay, StepStream, fake_agent, first_ids
from rlframe.types import Sequence, Transition, global_env_ids
from tests.replay import processes
from tests.replay.processes import DEADLINE, Process, assert_whole, expected_ids, first_id, make_step
from tests.waiting import wait_until


class Resources:
    """The buffers and processes of a test."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.processes: list[Process] = []

    def buffer(self, kind: str, item: Any, batch_size: int | None, capacity: int, **options: Any) -> Any:
        names = ("num_writers", "max_envs", "timeout", "seed")
        own = {name: options.pop(name) for name in names if name in options}
        agent = fake_agent(kind, item, batch_size, capacity, processes.STEP_SPEC, **options)
        self.made.append(SharedMemReplayBuffer(agent, **own))
        return self.made[-1]

    def process(self, function: Callable[..., None], buffer: Any, *args: Any) -> Process:
        self.processes.append(Process(function, buffer, *args))
        return self.processes[-1]


@pytest.fixture
def resources() -> Iterator[Resources]:
    made = Resources()
    yield made
    for process in made.processes:
        process.kill()
        process.end()
    for buffer in made.made:
        buffer.close()


def steps_of(rank: int, num_envs: int, steps: int, begin: int = 0) -> Iterator[tuple[np.ndarray, Any]]:
    """Yield the arguments of `add` for a writer that steps all its environments."""
    for t in range(begin, steps):
        ids = first_id(rank, 0, np.arange(num_envs)) + t
        yield global_env_ids(rank, np.arange(num_envs)), make_step(ids)


def sample_batches_until(buffer: Any, done: Callable[[], bool]) -> list[int]:
    """Sample and check batches until `done` returns True. Return the first ids of all sampled items."""
    firsts: list[int] = []
    deadline = time.monotonic() + DEADLINE
    while True:
        is_done = done()
        batch = buffer.wait_for_batch(0.05)
        if batch is not None:
            firsts += assert_whole(batch, buffer.spec.item).tolist()
        if is_done and (batch is None or buffer.spec.kind != "queue"):
            return firsts
        assert time.monotonic() < deadline


@pytest.mark.system
@pytest.mark.parametrize(
    ("kind", "item"), [("uniform", Transition(3, 0.9)), ("prioritized", Transition(1)), ("uniform", Sequence(5, 2))]
)
def test_sampled_items_are_complete_while_the_rings_wrap_many_times(resources: Resources, kind: str, item: Any) -> None:
    buffer = resources.buffer(kind, item, 64, 1500, num_writers=2)
    writers = [resources.process(processes.write_until_stopped, buffer, envs) for envs in (8, 5)]
    for writer in writers:
        writer.read_line()
    target = 25 * 1500  # a number of timesteps after which each ring has been overwritten many times
    seen = sample_batches_until(buffer, lambda: buffer.stats()["steps"] > target)
    assert {first // processes.PER_ENV // 10_000 for first in seen} == {0, 1}
    stats = buffer.stats()
    assert stats["sampled"] == len(seen) > 1000
    assert stats["added"] == stats["items"] + stats["evicted"]
    assert 500 < stats["items"] < 2500
    buffer.close()
    assert [writer.read_line() for writer in writers] == ["stopped", "stopped"]


@pytest.mark.system
@pytest.mark.parametrize(
    ("item", "batch_size"), [(Transition(1), 32), (Transition(3), 7), (Sequence(6), None), (Sequence(4, 3), 5)], ids=str
)
def test_queue_returns_every_item_of_every_writer_once(resources: Resources, item: Any, batch_size: int | None) -> None:
    buffer = resources.buffer("queue", item, batch_size, 600, num_writers=2)
    sizes = [(8, 400, None, False), (3, 300, None, True)]
    writers = [resources.process(processes.write, buffer, *arguments) for arguments in sizes]
    ranks = [writer.read_line()[0] for writer in writers]
    assert sorted(ranks) == [0, 1]
    seen = sample_batches_until(buffer, lambda: all(writer.popen.poll() == 0 for writer in writers))
    expected = set()
    for rank, (num_envs, steps, _, _) in zip(ranks, sizes):
        expected |= expected_ids(item, rank, 0, num_envs, steps)
    stats = buffer.stats()
    assert len(seen) == len(set(seen))
    assert set(seen) <= expected
    assert len(expected) - len(seen) == stats["items"] < (batch_size or 11)  # fewer than a batch remain
    assert stats["evicted"] == stats["evicted_unsampled"] == 0
    assert stats["added"] == len(expected)


@pytest.mark.system
@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_idle_writer_keeps_its_items(resources: Resources, kind: str) -> None:
    buffer = resources.buffer(kind, Transition(1), 64, 200, num_writers=2, max_envs=4)
    for _ in (0, 1):
        buffer.claim_rank(4)
    for arguments in steps_of(0, 4, 20):
        buffer.add(*arguments)
    for arguments in steps_of(1, 4, 2000):  # the ring wraps many times
        buffer.add(*arguments)
        assert_whole(buffer.sample(), Transition(1))
    seen = {first for _ in range(100) for first in assert_whole(buffer.sample(), Transition(1)).tolist()}
    assert len(seen) == buffer.size
    assert expected_ids(Transition(1), 0, 0, 4, 20) <= seen


def test_items_overwritten_during_a_copy_are_drawn_again(resources: Resources) -> None:
    buffer = resources.buffer("uniform", Transition(1), 64, 200)
    buffer.claim_rank(4)
    more = steps_of(0, 4, 10**6)
    for _ in range(100):
        buffer.add(*next(more))
    sampler = buffer._view().sampler
    sampler.choose_role()
    reads, read = [], sampler.reader.read

    def slow_read(numbers: np.ndarray, probabilities: np.ndarray) -> Any:
        reads.append(len(numbers))
        for _ in range(45 if len(reads) == 1 else 0):  # overwrite 180 of the 248 slots during the copy
            buffer.add(*next(more))
        return read(numbers, probabilities)

    sampler.reader.read = slow_read
    assert_whole(buffer.sample(), Transition(1))
    assert len(reads) == 2
    assert 20 < reads[1] < 64


@pytest.mark.system
def test_processes_claim_different_ranks(resources: Resources, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = resources.buffer("uniform", Transition(1), 8, 1000, num_writers=3)
    writers = [resources.process(processes.claim, buffer) for _ in range(3)]
    claimed = [writer.read_line() for writer in writers]
    assert sorted(claimed) == [[0, 0], [1, 0], [2, 0]]
    with pytest.raises(UsageError, match="num_writers=3, and all ranks are taken"):
        buffer.claim_rank(2)
    with pytest.raises(UsageError, match="Rank 3 was claimed"):
        buffer.claim_rank(2, rank=3)
    monkeypatch.setattr(segment_writers, "_EXIT_TIMEOUT", 0.05)
    with pytest.raises(UsageError, match="and is still running"):
        buffer.claim_rank(2, rank=1)
    os.kill(writers[1].popen.pid, signal.SIGKILL)  # the killed process is a zombie, but its rank is free
    monkeypatch.setattr(segment_writers, "_EXIT_TIMEOUT", DEADLINE)
    assert buffer.claim_rank(2, rank=claimed[1][0]) == (claimed[1][0], 1)


def test_items_of_a_killed_writer_stay_and_its_rank_can_be_claimed(resources: Resources) -> None:
    item = Sequence(6)
    buffer = resources.buffer("uniform", item, 32, 100_000)
    first = resources.process(processes.write_until_stopped, buffer, 4)
    assert first.read_line() == [0, 0]
    sample_batches_until(buffer, lambda: buffer.stats()["steps"] > 800)
    first.kill()
    before = buffer.stats()["items"]
    assert before > 100
    second = resources.process(processes.write, buffer, 4, 50)
    assert second.read_line() == [0, 1]
    assert second.read_line() == "done"
    assert buffer.size == before + len(expected_ids(item, 0, 1, 4, 50))
    seen = {first for _ in range(buffer.size) for first in assert_whole(buffer.sample(), item).tolist()}
    assert expected_ids(item, 0, 1, 4, 50) <= seen
    assert len(seen) == buffer.size


@pytest.mark.parametrize("kind", [pytest.param("uniform", marks=pytest.mark.system), "queue"])
def test_stopped_writer_does_not_block_sampling(resources: Resources, kind: str) -> None:
    buffer = resources.buffer(kind, Transition(1), 64, 400, num_writers=2)
    stopped, other = (resources.process(processes.write_until_stopped, buffer, 4) for _ in range(2))
    assert sorted([stopped.read_line(), other.read_line()]) == [[0, 0], [1, 0]]

    # Sample until the writers have taken `steps` more steps. Then the queue may still have items.
    def sample_for(steps: int) -> int:
        target, seen, deadline = buffer.stats()["steps"] + steps, 0, time.monotonic() + DEADLINE
        while buffer.stats()["steps"] < target:
            batch = buffer.wait_for_batch(0.1)
            seen += 0 if batch is None else len(assert_whole(batch, Transition(1)))
            assert time.monotonic() < deadline
        return seen

    sample_for(2000)
    os.kill(stopped.popen.pid, signal.SIGSTOP)
    assert sample_for(4000) > 0
    os.kill(stopped.popen.pid, signal.SIGCONT)


def test_full_queue_blocks_its_writer_until_items_are_sampled(resources: Resources) -> None:
    buffer = resources.buffer("queue", Transition(1), 10, 100, timeout=DEADLINE)
    assert buffer.sample() is None  # this process is the sampler
    writer = resources.process(processes.write, buffer, 1, 2000)
    writer.read_line()
    header = buffer._view().memory.headers[0]
    wait_until(lambda: header[block.IS_WAITING] == 1)
    assert 90 <= buffer.size == buffer.stats()["added"] < 200
    seen = sample_batches_until(buffer, lambda: writer.popen.poll() is not None)
    assert writer.read_line() == "done"
    in_order = sorted(expected_ids(Transition(1), 0, 0, 1, 2000))
    assert seen == in_order[: len(seen)]
    assert len(in_order) - len(seen) < 10


def test_first_batch_of_one_item_per_environment_waits_for_all_writers(resources: Resources) -> None:
    buffer = resources.buffer("queue", Sequence(3), None, 100, num_writers=2)
    buffer.claim_rank(4)
    for arguments in steps_of(0, 4, 3):
        buffer.add(*arguments)
    assert buffer.size == 4
    assert buffer.sample() is None
    buffer.claim_rank(2)
    assert buffer.sample() is None
    for arguments in steps_of(1, 2, 3):
        buffer.add(*arguments)
    assert_whole(batch := buffer.sample(), Sequence(3))
    assert sorted(batch.keys[:, 0].tolist()) == [0, 0, 0, 0, 1, 1]


def test_writer_of_a_queue_continues_after_old_items_are_dropped(resources: Resources) -> None:
    buffer = resources.buffer("queue", Sequence(2), 100, 200, max_staleness=0, timeout=DEADLINE)
    assert buffer.sample() is None  # this process is the sampler
    writer = resources.process(processes.write, buffer, 4, 1000)
    writer.read_line()
    buffer.forget_before(10**9)  # newer than the versions of all items
    deadline = time.monotonic() + DEADLINE
    while writer.popen.poll() is None:
        assert buffer.wait_for_batch(0.1) is None
        assert time.monotonic() < deadline
    stats = buffer.stats()
    assert stats["added"] == 2000 == stats["evicted_unsampled"] + stats["items"]


def test_waiting_writer_stops_after_end_waits(resources: Resources) -> None:
    buffer = resources.buffer("queue", Transition(1), 10, 100, timeout=DEADLINE)
    assert buffer.sample() is None
    message = resources.process(processes.write_until_end_waits, buffer, 1).read_line()
    assert message.startswith(
        "Writer 0 of the replay buffer was stopped while it waited for the sampler to sample the oldest"
    )


def test_timeout_error_of_a_writer_names_the_sampler(resources: Resources) -> None:
    buffer = resources.buffer("queue", Transition(1), 10, 100, timeout=0.3)
    assert buffer.sample() is None
    code, text = resources.process(processes.write, buffer, 1, 2000).end()
    assert code == 1
    assert f"the sampler (process {os.getpid()}, which is still running) to sample the oldest items" in text
    assert "WriterTimeoutError" in text
    assert issubclass(WriterTimeoutError, TimeoutError)


def test_samples_per_insert_makes_writers_wait(resources: Resources) -> None:
    buffer = resources.buffer("uniform", Transition(1), 16, 5000, min_size=20, samples_per_insert=2.0)
    assert buffer.sample() is None
    writer = resources.process(processes.write, buffer, 4, 1000)
    writer.read_line()
    expected = len(expected_ids(Transition(1), 0, 0, 4, 1000))
    sampled, deadline = 0, time.monotonic() + DEADLINE
    while sampled < 2 * (expected - 20) - 2 * 16:  # after these samples, the writer can finish
        added = buffer.stats()["added"]
        assert 2 * (added - 20) <= sampled + 2 * 16 + 2 * 4  # at most two batches and one step ahead
        batch = buffer.wait_for_batch(1.0)
        sampled += 0 if batch is None else 16
        assert time.monotonic() < deadline
        assert sampled <= 2 * (buffer.stats()["added"] - 20) + 16
    assert writer.read_line() == "done"


def test_close_ends_the_waits_of_writers_and_datasets(resources: Resources) -> None:
    buffer = resources.buffer("queue", Transition(1), 10_000, 20_000, timeout=600.0)
    reader = resources.process(processes.read_dataset, buffer)
    assert reader.read_line() == "reads"
    writer = resources.process(processes.write_until_stopped, buffer, 1)
    writer.read_line()
    control = buffer._view().memory.control
    wait_until(lambda: control[block.SAMPLED] > 0)  # the writer and the reader have begun
    began = time.monotonic()
    buffer.close()
    assert writer.read_line() == "stopped"
    assert reader.read_line() == "ended"
    assert time.monotonic() - began < DEADLINE  # `close` ended the waits before their timeout


@pytest.mark.system
def test_new_sampler_continues_a_queue_after_the_old_sampler_died(resources: Resources) -> None:
    item = Transition(2)
    buffer = resources.buffer("queue", item, 50, 2000, num_writers=2)
    # Give each writer a rank. Otherwise the second writer could get the rank of a first writer that has ended.
    writers = [resources.process(processes.write, buffer, 5, 100, rank) for rank in range(2)]
    ranks = [writer.read_line()[0] for writer in writers]
    assert [writer.read_line() for writer in writers] == ["done", "done"]
    first = resources.process(processes.sample, buffer, 3)
    seen = [x for _ in range(3) for x in first.read_line()]
    first.read_line()
    expected = expected_ids(item, ranks[0], 0, 5, 100) | expected_ids(item, ranks[1], 0, 5, 100)
    assert buffer.size == len(expected) - 150
    assert buffer.stats()["sampled"] == 150
    with pytest.raises(UsageError, match=f"process {first.popen.pid} samples it"):
        buffer.sample()
    first.kill()
    while (batch := buffer.sample()) is not None:
        seen += assert_whole(batch, item).tolist()
    assert len(seen) == len(set(seen)) == len(expected) // 50 * 50
    assert set(seen) <= expected
    assert buffer.stats()["evicted"] == 0


def test_other_processes_read_a_prioritized_buffer_uniformly(resources: Resources) -> None:
    buffer = resources.buffer("prioritized", Transition(1), 500, 2000, priority_exponent=1.0)
    buffer.claim_rank(2)
    for arguments in steps_of(0, 2, 50):
        buffer.add(*arguments)
    batch = buffer.sample()
    buffer.update_priorities(batch.keys, np.where(batch.keys[:, 2] == batch.keys[0, 2], 1.0, 0.0))
    assert set(buffer.sample().keys[:, 2]) == {batch.keys[0, 2]}
    reader = resources.process(processes.sample, buffer, 1)
    seen = set(reader.read_line())
    assert len(seen) > 0.9 * buffer.size
    assert reader.read_line()[0] == pytest.approx(1 / buffer.size)


def test_copy_opens_the_buffer_while_its_creator_is_alive(resources: Resources, tmp_path: Path) -> None:
    import cloudpickle

    buffer = resources.buffer("uniform", Transition(1), 8, 1000)
    text = cloudpickle.dumps(buffer)
    assert len(text) < 5000
    copy = pickle.loads(text)
    copy.claim_rank(2)
    for arguments in steps_of(0, 2, 50):
        copy.add(*arguments)
    assert buffer.size == copy.size > 50
    assert_whole(buffer.sample(), Transition(1))
    gone = pickle.loads(text)
    name = gone._plan.name
    gone._plan = gone._plan._replace(name=name._replace(creator=name.creator._replace(started=1), token=1))
    with pytest.raises(BufferGoneError, match=f"Process {os.getpid()}, which created"):
        gone.claim_rank(2)


def test_crashed_creator_leaves_no_memory_behind(resources: Resources) -> None:
    creator = resources.process(processes.make, None)
    text = bytes.fromhex(creator.read_line())
    buffer = pickle.loads(text)
    buffer.claim_rank(1)
    steps = steps_of(0, 1, 10**6)
    buffer.add(*next(steps))
    inode = os.fstat(buffer._view().memory._shared._descriptor).st_ino
    assert inode in memories()
    creator.kill()
    with pytest.raises(BufferGoneError, match=f"Process {creator.popen.pid}, which created"):
        while True:  # this process can still use its mapped memory, but a waiting writer gets an error
            buffer.add(*next(steps))
    with pytest.raises(BufferGoneError, match="Start the program again"):
        plan = buffer._plan
        block.BufferMemory(plan.name, plan.num_writers, plan.rows, plan.spec, plan.step_spec)
    del buffer
    gc.collect()
    assert inode not in memories()


def memories() -> set[int]:
    """Return the inodes of all replay-buffer memory that is open in a process or has a file name."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # ignore processes that exit during the search
            if os.readlink(path).startswith("/memfd:rlframe-replay"):
                found.add(path.stat().st_ino)
    named = [path.stat().st_ino for path in Path("/dev/shm").glob("*rlframe*")]
    return found.union(named)


def test_writer_with_more_than_max_envs_environments_is_refused(resources: Resources) -> None:
    buffer = resources.buffer("uniform", Transition(1), 8, 1000, max_envs=10)
    with pytest.raises(UsageError, match="larger max_envs"):
        buffer.claim_rank(11)
    assert buffer.claim_rank(10)[0] == 0


def test_capacity_of_a_shared_buffer_beyond_the_available_memory_is_refused(
    resources: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_store, "available_memory", lambda: 1_000_000)
    with pytest.raises(UsageError, match=r"A capacity of \d+ steps would fit"):
        resources.buffer("uniform", Transition(1), 8, 100_000)
    buffer = resources.buffer("uniform", Transition(1), 8, 2_000)  # 0.9 MB
    with pytest.raises(UsageError, match="memory is available"):
        buffer.claim_rank(1000)


def test_dataset_wakes_up_when_a_writer_adds_items(resources: Resources) -> None:
    buffer = resources.buffer("queue", Transition(1), 20, 2000, timeout=DEADLINE)
    with buffer.make_dataset(timeout=DEADLINE) as dataset:
        writer = resources.process(processes.write, buffer, 4, 300)
        expected = expected_ids(Transition(1), 0, 0, 4, 300)
        seen = [first for _ in range(len(expected) // 20) for first in assert_whole(next(dataset), Transition(1))]
        assert len(seen) == len(set(seen))
        assert set(seen) <= expected
        assert [writer.read_line(), writer.read_line()] == [[0, 0], "done"]


def test_no_item_begins_at_a_slot_whose_eviction_was_interrupted(
    resources: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Exception):
        pass

    def evict(self: Any, index: Any) -> None:
        self._header[block.FLOOR] = self._timeline.floor
        raise Killed  # the process is killed before the flags of the slots are cleared

    buffer = SharedMemReplayBuffer(fake_agent("uniform", Transition(1), 64, 200), num_writers=1, max_envs=4)
    resources.made.append(buffer)
    reference, stream = ReferenceReplay(Transition(1)), StepStream(4, end=0.4)

    def claim() -> None:
        assert buffer.claim_rank(4, 0)[0] == 0
        reference.claim_rank(4, 0)

    def add() -> None:
        env_ids, step = stream.step()
        buffer.add(env_ids, step)
        reference.add(env_ids, step)

    claim()
    for _ in range(100):
        add()
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(block.LogTable, "evict", evict)
        while True:
            add()
    stream.restart(np.arange(4))
    claim()
    for _ in range(200):
        add()
        assert set(first_ids(buffer.sample()).tolist()) <= set(reference.items)
