"""Tests that a restored shared replay buffer has the items, priorities and draws of the saved buffer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rlframe.errors import CheckpointError
from rlframe.replay import ReplayBuffer, SharedMemReplayBuffer
from rlframe.testing.streams import StepStream, fake_agent
from rlframe.types import Sequence, Transition
from tests.replay import processes
from tests.replay.processes import assert_whole, expected_ids
from tests.replay.test_shared_memory import Resources, resources, sample_batches_until, steps_of

__all__ = ["resources"]


@pytest.fixture
def make() -> Iterator[Any]:
    made = []

    def build(*args: Any, seed: int = 0, num_writers: int = 2, **options: Any) -> Any:
        made.append(SharedMemReplayBuffer(fake_agent(*args, **options), num_writers=num_writers, seed=seed))
        return made[-1]

    yield build
    for buffer in made:
        buffer.close()


def feed(buffers: list[Any], streams: list[StepStream], steps: int) -> None:
    for _ in range(steps):
        for stream in streams:
            ids, step = stream.step()
            for buffer in buffers:
                buffer.add(ids, step)


def assert_same_batches(a: Any, b: Any) -> None:
    for _ in range(5):
        one, two = a.sample(), b.sample()
        assert (one is None) == (two is None)
        jax.tree_util.tree_map(np.testing.assert_array_equal, one, two)
        if one is not None and a.spec.kind == "prioritized":
            for buffer in (a, b):
                buffer.update_priorities(one.keys, np.arange(len(one.keys)) + 0.5)


@pytest.mark.parametrize("kind", ["uniform", "prioritized", "queue"])
@pytest.mark.parametrize("item", [Transition(3), Sequence(4, 2)], ids=str)
@pytest.mark.parametrize("steps", [7, 90])
def test_restored_buffer_draws_the_same_batches(tmp_path: Path, make: Any, kind: str, item: Any, steps: int) -> None:
    saved, streams = make(kind, item, 6, 240, seed=3), [StepStream(4, 0), StepStream(3, 1)]
    for stream in streams:
        saved.claim_rank(stream.num_envs)
    feed([saved], streams, steps)
    saved.sample()
    saved.save(tmp_path / "replay")
    restored = make(kind, item, 6, 240, seed=99)
    assert restored.claim_rank() == (0, 0)
    restored.open_segment(0, 4)  # an actor may start before the learner restores the buffer
    restored.restore(tmp_path / "replay")
    assert restored.claim_rank(3, rank=1) == (1, 1)
    want, got = saved.stats(), restored.stats()
    assert {**want, "bytes": 0} == {**got, "bytes": 0}
    assert_same_batches(saved, restored)
    # After a restore, writers begin new fragments. For the comparison, the saved buffer's writers must do the same.
    for stream in streams:
        saved.claim_rank(stream.num_envs, rank=stream.rank)
    before = restored.stats()["added"]
    feed([saved, restored], streams, 40)
    assert restored.stats()["added"] == saved.stats()["added"] > before
    assert restored.size == saved.size
    assert os.listdir(tmp_path) == ["replay"]


@pytest.mark.system
def test_buffer_is_saved_while_its_writers_continue(tmp_path: Path, resources: Resources) -> None:
    item = Sequence(5)
    buffer = resources.buffer("prioritized", item, 64, 30_000, num_writers=2)
    writers = [resources.process(processes.write_until_stopped, buffer, 6) for _ in range(2)]
    for writer in writers:
        writer.read_line()
    sample_batches_until(buffer, lambda: buffer.stats()["steps"] > 40_000)
    for _ in range(5):
        buffer.save(tmp_path / "replay")
        restored = resources.buffer("prioritized", item, 64, 30_000, num_writers=2)
        restored.restore(tmp_path / "replay")
        assert restored.size > 0
        for _ in range(20):
            assert_whole(restored.sample(), item)
    assert [writer.popen.poll() for writer in writers] == [None, None]


def test_restore_into_an_existing_buffer_only_restores_priorities(tmp_path: Path, resources: Resources) -> None:
    buffer = resources.buffer("prioritized", Transition(1), 64, 1000, priority_exponent=1.0)
    buffer.claim_rank(2)
    for arguments in steps_of(0, 2, 20):
        buffer.add(*arguments)
    keys = buffer.sample().keys
    while len(np.unique(keys[:, 2])) < buffer.size:
        keys = np.concatenate([keys, buffer.sample().keys])
    buffer.update_priorities(keys, keys[:, 2] % 5 + 1.0)
    buffer.save(tmp_path / "replay")
    buffer.update_priorities(keys, np.full(len(keys), 9.0))
    for arguments in steps_of(0, 2, 30, begin=20):
        buffer.add(*arguments)
    size = buffer.size
    buffer.restore(tmp_path / "replay")
    assert buffer.size == size == len(expected_ids(Transition(1), 0, 0, 2, 30))
    batch = buffer.sample()
    old = batch.keys[:, 2] <= keys[:, 2].max()
    priorities = np.where(old, batch.keys[:, 2] % 5 + 1.0, 9.0)
    np.testing.assert_allclose(batch.probabilities / batch.probabilities[0], priorities / priorities[0], rtol=1e-5)
    assert len(set(priorities)) > 3


def test_second_restore_of_the_same_file_keeps_newer_items_and_restores_priorities(tmp_path: Path, make: Any) -> None:
    saved, stream = make("prioritized", Transition(1), 6, 240, priority_exponent=1.0), StepStream(4)
    saved.claim_rank(4)
    feed([saved], [stream], 10)
    keys = saved.sample().keys
    saved.update_priorities(keys, np.full(6, 50.0))
    saved.save(tmp_path / "replay")
    buffer = make("prioritized", Transition(1), 6, 240, priority_exponent=1.0)  # the new buffer of a resumed run
    buffer.claim_rank(4)
    buffer.restore(tmp_path / "replay")
    feed([buffer], [stream], 2)
    while len(np.unique(keys[:, 2])) < buffer.size:
        keys = np.concatenate([keys, buffer.sample().keys])
    size = buffer.size
    buffer.update_priorities(keys, np.ones(len(keys)))
    buffer.restore(tmp_path / "replay")  # the learner died again before it saved
    assert buffer.size == size > saved.size
    assert buffer.sample().probabilities.max() > 5 / size


def test_restore_into_a_buffer_in_use_is_refused(tmp_path: Path, make: Any) -> None:
    saved, stream = make("uniform", Transition(1), 6, 240), StepStream(4)
    saved.claim_rank(4)
    feed([saved], [stream], 30)
    saved.save(tmp_path / "replay")
    other = make("uniform", Transition(1), 6, 240)
    other.claim_rank(4)
    feed([other], [stream], 1)
    before = other.stats()
    with pytest.raises(CheckpointError, match="writer 0 has already added steps"):
        other.restore(tmp_path / "replay")
    assert other.stats() == before


def test_files_of_other_buffers_are_refused(tmp_path: Path, make: Any) -> None:
    agent = fake_agent("uniform", Transition(1), 6, 240)
    local = ReplayBuffer(agent)
    local.claim_rank(4)
    local.save(tmp_path / "local")
    saved = make("uniform", Transition(1), 6, 240)
    saved.claim_rank(4)
    saved.save(tmp_path / "shared")
    with pytest.raises(CheckpointError, match="num_writers=None"):
        make("uniform", Transition(1), 6, 240).restore(tmp_path / "local")
    with pytest.raises(CheckpointError, match="num_writers=2"):
        make("uniform", Transition(1), 6, 240, num_writers=3).restore(tmp_path / "shared")
    with pytest.raises(CheckpointError, match="capacity=250"):
        make("uniform", Transition(1), 6, 250).restore(tmp_path / "shared")


def test_damaged_file_leaves_the_buffer_unchanged(tmp_path: Path, make: Any) -> None:
    saved, stream, path = make("uniform", Transition(1), 6, 240), StepStream(4), tmp_path / "replay"
    saved.claim_rank(4)
    feed([saved], [stream], 30)
    saved.save(path)
    good = path.read_bytes()
    buffer = make("uniform", Transition(1), 6, 240)
    buffer.claim_rank(4)
    for position in range(0, len(good), len(good) // 15):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(CheckpointError, match="replay"):
            buffer.restore(path)
        assert buffer.size == 0
    feed([buffer], [stream], 5)
    assert buffer.size > 0
    assert buffer.sample() is not None
