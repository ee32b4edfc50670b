"""Tests that a restored replay buffer continues exactly like the saved buffer."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rlframe.errors import CheckpointError
from rlframe.replay import ReplayBuffer, replay_files
from rlframe.testing.streams import STEP_SPEC, StepStream, fake_agent
from rlframe.types import Sequence, StepSpec, Transition, specs


def feed(buffers: list[ReplayBuffer], stream: StepStream, steps: int, subsets: bool = False) -> None:
    for t in range(steps):
        ids, step = stream.step(np.array([t % 4, (t + 1) % 4]) if subsets else None)
        for buffer in buffers:
            buffer.add(ids, step)


def assert_same_batches(a: ReplayBuffer, b: ReplayBuffer, count: int = 5) -> None:
    for _ in range(count):
        one, two = a.sample(), b.sample()
        assert (one is None) == (two is None)
        jax.tree_util.tree_map(np.testing.assert_array_equal, one, two)
        if one is not None and a.spec.kind == "prioritized":
            for buffer in (a, b):
                buffer.update_priorities(one.keys, np.arange(len(one.keys)) + 0.5)


@pytest.mark.parametrize("subsets", [False, True])
@pytest.mark.parametrize("kind", ["uniform", "prioritized", "queue"])
@pytest.mark.parametrize("item", [Transition(3), Sequence(4, 2)], ids=str)
@pytest.mark.parametrize("steps", [7, 90])
def test_restored_buffer_draws_the_same_batches(
    tmp_path: Path, kind: str, item: Any, steps: int, subsets: bool
) -> None:
    agent = fake_agent(kind, item, 6, 120)
    saved, stream = ReplayBuffer(agent, seed=3), StepStream(4)
    saved.claim_rank(4)
    feed([saved], stream, steps, subsets)
    saved.sample()
    saved.save(tmp_path / "replay")

    restored = ReplayBuffer(agent, seed=99)
    restored.claim_rank(4)
    restored.restore(tmp_path / "replay")
    assert restored.stats() == saved.stats()
    assert_same_batches(saved, restored)
    for _ in range(5):
        feed([saved, restored], stream, 30, subsets)
        assert_same_batches(saved, restored)
    assert restored.stats() == saved.stats()
    assert os.listdir(tmp_path) == ["replay"]


def test_rank_gets_the_next_incarnation_after_a_restore(tmp_path: Path) -> None:
    agent = fake_agent("uniform", Transition(1), 6, 120)
    saved = ReplayBuffer(agent)
    saved.claim_rank(4)
    saved.claim_rank(4, rank=0)
    feed([saved], StepStream(4), 5)
    saved.save(tmp_path / "replay")
    restored = ReplayBuffer(agent)
    restored.restore(tmp_path / "replay")
    assert restored.claim_rank(4, rank=0) == (0, 2)
    assert restored.size == saved.size


def test_single_frames_and_separate_frames_are_restored(tmp_path: Path) -> None:
    frames = specs.Array((3, 32, 32), np.uint8)
    agent = fake_agent("uniform", Transition(2), 16, 100, StepSpec(frames, STEP_SPEC.action, STEP_SPEC.extras, ()))
    saved, rng = ReplayBuffer(agent), np.random.default_rng(0)
    from tests.replay.test_frames import FrameStream

    saved.claim_rank(2)
    stream = FrameStream(rng, 2, frames.shape)
    for _ in range(40):
        saved.add(*stream.step())
    saved.save(tmp_path / "replay")
    restored = ReplayBuffer(agent)
    restored.restore(tmp_path / "replay")
    for _ in range(100):
        ids, step = stream.step()
        saved.add(ids, step)
        restored.add(ids, step)
        assert_same_batches(saved, restored, 1)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "garbage", "longer"])
def test_restoring_a_damaged_file_raises_and_leaves_the_buffer_unchanged(tmp_path: Path, damage: str) -> None:
    agent = fake_agent("uniform", Transition(1), 6, 120)
    buffer = ReplayBuffer(agent)
    buffer.claim_rank(4)
    feed([buffer], StepStream(4), 50)
    path = tmp_path / "replay"
    buffer.save(path)
    good = path.read_bytes()
    for position in range(0, len(good), len(good) // 20) if damage in ("flip", "cut") else [0]:
        bad = {
            "flip": good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :],
            "cut": good[:position],
            "empty": b"",
            "garbage": b"\x00" * 1000,
            "longer": good + b"x",
        }[damage]
        path.write_bytes(bad)
        before = buffer.stats()
        with pytest.raises(CheckpointError, match="replay"):
            buffer.restore(path)
        assert buffer.stats() == before
        assert buffer.sample() is not None


def test_restoring_a_missing_file_or_the_file_of_another_agent_is_refused(tmp_path: Path) -> None:
    buffer = ReplayBuffer(fake_agent("uniform", Transition(1), 6, 120))
    with pytest.raises(CheckpointError, match="nowhere"):
        buffer.restore(tmp_path / "nowhere")
    buffer.claim_rank(4)
    buffer.save(tmp_path / "replay")
    with pytest.raises(CheckpointError, match="capacity=130"):
        ReplayBuffer(fake_agent("uniform", Transition(1), 6, 130)).restore(tmp_path / "replay")
    other = STEP_SPEC._replace(action=specs.Array((2,), np.float32))
    with pytest.raises(CheckpointError, match="action"):
        ReplayBuffer(fake_agent("uniform", Transition(1), 6, 120, other)).restore(tmp_path / "replay")


def test_full_disk_leaves_the_old_file_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ReplayBuffer(fake_agent("uniform", Transition(1), 6, 120))
    buffer.claim_rank(4)
    buffer.save(tmp_path / "replay")
    good = (tmp_path / "replay").read_bytes()

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(replay_files, "_write_array", full)
    with pytest.raises(CheckpointError, match="No space left"):
        buffer.save(tmp_path / "replay")
    assert (tmp_path / "replay").read_bytes() == good
    assert os.listdir(tmp_path) == ["replay"]
