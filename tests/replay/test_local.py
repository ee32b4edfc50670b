"""Tests of the in-process buffer: memory, options, shapes, and datasets."""

from __future__ import annotations

import pathlib
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import pytest

from rlframe.errors import UsageError
from rlframe.replay import ReplayBuffer, tree_store
from rlframe.replay.base import DatasetTimeoutError
from rlframe.testing.streams import STEP_SPEC, ReferenceReplay, StepStream, assert_batch_matches, fake_agent, first_ids
from rlframe.types import AgentOutput, Sequence, Step, StepSpec, TimeStep, Transition, specs
from tests.waiting import wait_until


def test_capacity_beyond_the_available_memory_is_refused_before_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_store, "available_memory", lambda: 1_000_000)
    with pytest.raises(UsageError, match=r"100000 steps.*A capacity of \d+ steps would fit") as caught:
        ReplayBuffer(fake_agent("uniform", Transition(1), 8, 100_000))
    fits = int(str(caught.value).split("A capacity of ")[1].split()[0])
    assert 5_000 < fits < 20_000
    ReplayBuffer(fake_agent("uniform", Transition(1), 8, fits)).claim_rank(4)


@pytest.mark.parametrize("version", [1, 2])
def test_container_limits_reduce_the_available_memory(
    version: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    inner = root / ("memory/pod/box" if version == 1 else "pod/box")
    inner.mkdir(parents=True)
    own.write_text("4:memory:/pod/box\n3:cpuset:/\n0::/\n" if version == 1 else "0::/pod/box\n")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limit, usage, cache = names if version == 1 else ("memory.max", "memory.current", "inactive_file")
    for directory, numbers in [(inner, ("9000000", "5000000", "1000000")), (inner.parent, ("8000000", "6000000", "0"))]:
        for name, number in zip((limit, usage, "memory.stat"), numbers, strict=True):
            (directory / name).write_text(f"anon 7\n{cache} {number}\n" if name == "memory.stat" else number + "\n")
    monkeypatch.setattr(tree_store, "_PROCESS_CGROUPS", own)
    monkeypatch.setattr(tree_store, "_CGROUPS", root)
    assert tree_store.available_memory() == 2_000_000  # the limit of `pod`; `box` alone would have 5,000,000
    (inner.parent / limit).write_text("max\n" if version == 2 else f"{2**63 - 4096}\n")
    assert tree_store.available_memory() == 5_000_000


def test_sampling_begins_even_if_min_size_equals_the_capacity() -> None:
    buffer = ReplayBuffer(fake_agent("uniform", Transition(1), 8, 100, min_size=100))
    stream = StepStream(4, end=0.5)  # half of the timesteps end an episode, so no item begins there
    buffer.claim_rank(4)
    for _ in range(100):
        buffer.add(*stream.step())
        assert (buffer.sample() is not None) == (buffer.stats()["added"] >= 100)
    assert buffer.size < 100 < buffer.stats()["added"]


def test_writer_without_a_first_step_lapses_only_after_twice_the_time() -> None:
    lapse_after = 0.2
    buffer = ReplayBuffer(fake_agent("queue", Sequence(2), None, 200, lapse_after=lapse_after))
    stream = StepStream(2)
    for _ in range(2):
        buffer.claim_rank(2)
    for _ in range(2):
        buffer.add(*stream.step())
    began = time.monotonic()
    batch = wait_until(buffer.sample)
    assert time.monotonic() - began >= 2 * lapse_after
    assert batch.keys[:, 0].tolist() == [0, 0]


def test_bytes_in_stats_match_the_arrays() -> None:
    for item in (Transition(3), Sequence(8)):
        buffer = ReplayBuffer(fake_agent("uniform", item, 8, 10_000))
        buffer.claim_rank(4)
        store = buffer._store
        store.timeline.head = store.table.end = 2 * buffer.slots  # `arrays` then returns all rows
        taken = sum(array.nbytes for array in store.arrays().values())
        assert buffer.stats()["bytes"] == pytest.approx(taken, rel=0.05)


def test_spec_fields_can_be_overridden_and_unknown_fields_are_refused() -> None:
    buffer = ReplayBuffer(fake_agent("uniform", Transition(1), 8, 100), capacity=50, batch_size=3, kind="queue")
    assert (buffer.spec.capacity, buffer.spec.batch_size, buffer.spec.kind) == (50, 3, "queue")
    with pytest.raises(UsageError, match="Did you mean 'capacity'"):
        ReplayBuffer(fake_agent("uniform", Transition(1), 8, 100), capacty=50)


def test_priorities_of_a_uniform_buffer_are_refused() -> None:
    with pytest.raises(UsageError, match="uniform"):
        ReplayBuffer(fake_agent("uniform", Transition(1), 8, 100)).update_priorities(np.zeros((1, 3)), np.ones(1))


def test_error_for_a_writer_with_too_many_environments_names_the_needed_capacity() -> None:
    buffer = ReplayBuffer(fake_agent("queue", Sequence(20), None, 100))
    buffer.claim_rank(4)
    buffer.add(*StepStream(4).step())
    with pytest.raises(UsageError, match="capacity to at least"):
        buffer.claim_rank(400)


def test_queue_has_slots_for_one_item_per_environment_even_if_its_capacity_is_lower() -> None:
    buffer, stream = ReplayBuffer(fake_agent("queue", Sequence(20), None, 10)), StepStream(8)
    buffer.claim_rank(8)
    for _ in range(20):
        buffer.add(*stream.step())
    assert buffer.sample().data.reward.shape == (8, 20)


def test_batches_whose_size_does_not_divide_the_ring_are_stored_correctly() -> None:
    buffer, reference = ReplayBuffer(fake_agent("uniform", Transition(3), 8, 100)), ReferenceReplay(Transition(3))
    streams = [StepStream(4, 0), StepStream(7, 1)]
    for stream in streams:
        buffer.claim_rank(stream.num_envs)
        reference.claim_rank(stream.num_envs, stream.rank)
    for t in range(100):
        ids, step = streams[0 if t % 5 == 0 else 1].step()
        buffer.add(ids, step)
        reference.add(ids, step)
        if (batch := buffer.sample()) is not None:
            assert_batch_matches(batch, reference)


class Memory(NamedTuple):
    """A recurrent state that is a named tuple. Many libraries use such states."""

    hidden: Any
    cell: Any


def test_batches_have_the_same_tree_structures_as_steps() -> None:
    leaf = specs.Array((2,), np.float32)
    spec = StepSpec({"a": leaf, "b": (leaf, leaf)}, [leaf], {}, Memory(leaf, leaf))
    buffer = ReplayBuffer(fake_agent("queue", Sequence(2), 3, 100, spec))
    buffer.claim_rank(3)
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    timestep = TimeStep(np.full(3, 1, np.uint8), x[:, 0], x[:, 0], {"a": x, "b": (x + 1, x + 2)})
    for _ in range(2):
        buffer.add(np.arange(3), Step(timestep, AgentOutput([x + 3]), Memory(x + 4, x + 5), 0, timestep))
    data = buffer.sample().data
    np.testing.assert_array_equal(data.observation["b"][1][:, 0], x + 2)
    np.testing.assert_array_equal(data.action[0][:, 1], x + 3)
    assert isinstance(data.agent_state, Memory)
    np.testing.assert_array_equal(data.agent_state.cell, x + 5)


def test_large_arrays_are_reused_only_without_references() -> None:
    spec = STEP_SPEC._replace(observation=specs.Array((200_000,), np.uint8), extras={}, agent_state=())
    buffer = ReplayBuffer(fake_agent("uniform", Transition(1), 4, 20, spec))
    buffer.claim_rank(2)
    rng = np.random.default_rng(0)

    def timestep() -> TimeStep:
        ones = np.ones(2, np.float32)
        return TimeStep(np.full(2, 1, np.uint8), ones, ones, rng.integers(0, 255, (2, 200_000)).astype(np.uint8))

    before = timestep()
    for _ in range(8):
        after = timestep()
        buffer.add(np.arange(2), Step(before, AgentOutput(np.zeros(2, np.int32)), (), 0, after))
        before = after
    held = buffer.sample().data.observation[1:]  # a view; only this view refers to the whole array
    copy = held.copy()
    places = set()
    for _ in range(10):
        batch = buffer.sample()
        places.add(batch.data.observation.ctypes.data)
    np.testing.assert_array_equal(held, copy)
    assert held.base.ctypes.data not in places
    assert len(places) <= 3


def test_dataset_returns_added_items_and_ends_with_its_buffer() -> None:
    buffer, stream = ReplayBuffer(fake_agent("queue", Transition(1), 5, 1000)), StepStream(5, end=0.0)
    buffer.claim_rank(5)
    seen: list[int] = []

    def read(dataset: Any) -> None:
        for batch in dataset:
            seen.extend(first_ids(batch).tolist())
            if len(seen) == 50:
                break

    dataset = buffer.make_dataset()
    reader = threading.Thread(target=read, args=(dataset,))
    reader.start()
    for _ in range(10):
        buffer.add(*stream.step())
    reader.join(timeout=20)
    assert len(set(seen)) == 50
    buffer.close()
    with pytest.raises(StopIteration):
        next(dataset)
    assert not dataset._thread.is_alive()


def test_dataset_raises_the_error_of_its_thread_and_closes() -> None:
    buffer, stream = ReplayBuffer(fake_agent("uniform", Transition(1), 5, 1000)), StepStream(5)
    buffer.claim_rank(5)
    buffer.add(*stream.step())
    buffer._store.read = lambda *_: 1 / 0
    with buffer.make_dataset() as dataset, pytest.raises(ZeroDivisionError):
        next(dataset)
    assert not dataset._thread.is_alive()


def test_dataset_timeout_error_names_the_needed_items() -> None:
    buffer = ReplayBuffer(fake_agent("uniform", Transition(1), 5, 1000, min_size=77))
    with buffer.make_dataset(timeout=0.05) as dataset, pytest.raises(DatasetTimeoutError, match="needs 77"):
        next(dataset)
