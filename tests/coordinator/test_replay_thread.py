"""Keys are drawn and settled by a thread of the coordinator's: here with the real buffer in shared memory."""

from __future__ import annotations

import pathlib
import queue
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.messages import Header, Update
from rlframe.coordinator.replay_thread import ReplayThread
from rlframe.errors import CheckpointError, RlframeError
from rlframe.replay import SharedMemReplayBuffer
from rlframe.testing.streams import StepStream, fake_agent
from rlframe.types import Sequence, Transition

WITHIN = 60.0  # seconds
ONE = Transition(1)


class Store:
    """Whose versions are pinned."""

    def __init__(self) -> None:
        self.pins: list[int] = []
        self.raises: Exception | None = None

    def pin(self, policy_id: str) -> int:
        if self.raises is not None:
            raise self.raises
        self.pins.append(5)
        return 5

    def unpin(self, policy_id: str, version: int) -> None:
        self.pins.remove(version)


class Scene:
    """A buffer, and threads that draw from it."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path, self.store = path, Store()
        self.buffers: list[Any] = []
        self.threads: list[ReplayThread] = []
        self._happened: queue.Queue[Any] = queue.Queue()
        self._seq = 0

    def buffer(self, kind: str = "prioritized", item: Any = ONE, **options: Any) -> Any:
        agent = fake_agent(kind, item, 4, 100, **options)
        buffer = SharedMemReplayBuffer(agent, num_writers=1, seed=0)
        self.buffers.append(buffer)
        return buffer

    def thread(self, buffer: Any) -> ReplayThread:
        thread = ReplayThread(buffer, self.store, self._happened.put, self.path)
        self.threads.append(thread)
        thread.start()
        return thread

    def next(self) -> Any:
        return self._happened.get(timeout=WITHIN)

    def draw(self, thread: ReplayThread, count: int = 1) -> ev.BatchesDrawn:
        self._seq += 1
        header = Header("learn/1", 0, "learner/0", 0, self._seq)
        thread.put(ev.DrawBatches(header, count))
        drawn = self.next()
        assert isinstance(drawn, ev.BatchesDrawn) and drawn.header == header
        return drawn

    def flush(self, thread: ReplayThread) -> None:
        """Returns when all that was put before is done."""
        thread.put(ev.Pin("evaluate/1", "main"))
        assert isinstance(self.next(), ev.Pinned)


@pytest.fixture
def scene(tmp_path: pathlib.Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "replay")
    yield scene
    for thread in scene.threads:
        thread.close()
    for buffer in scene.buffers:
        buffer.close()


def fill(buffer: Any, steps: int = 10) -> None:
    stream = StepStream(2)
    buffer.claim_rank(2)
    for _ in range(steps):
        buffer.add(*stream.step())


def raising(error: Exception) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise error

    return call


def test_batches_are_drawn_by_their_keys(scene: Scene) -> None:
    buffer = scene.buffer()
    fill(buffer)
    drawn = scene.draw(scene.thread(buffer), 3)
    assert [batch.keys.shape for batch in drawn.batches] == [(4, 3)] * 3 and drawn.why == ""
    for batch in drawn.batches:
        fetched = buffer.fetch(batch.keys, batch.probabilities)
        np.testing.assert_array_equal(fetched.keys, batch.keys)


def test_where_there_is_too_little_none_is_drawn(scene: Scene) -> None:
    drawn = scene.draw(scene.thread(scene.buffer()), 3)
    assert drawn.batches == () and drawn.why == ""


def test_a_queue_gives_as_many_as_it_has(scene: Scene) -> None:
    buffer = scene.buffer("queue")
    fill(buffer, 6)
    there = buffer.size // 4
    assert there >= 2
    thread = scene.thread(buffer)
    drawn = scene.draw(thread, 30)
    assert len(drawn.batches) == there
    thread.put(ev.FinishBatches(drawn.batches, ()))
    scene.flush(thread)
    thread.close()
    stats = thread.stats
    assert stats["added"] == stats["items"] + stats["evicted"] + stats["sampled"] and stats["sampled"] == 4 * there


def test_priorities_are_set_by_what_was_learned(scene: Scene) -> None:
    buffer = scene.buffer(priority_exponent=1.0)
    fill(buffer)
    thread = scene.thread(buffer)
    batches = scene.draw(thread, 20).batches
    updates = tuple(Update(batch.keys, batch.keys[:, 2] % 3 + 1.0) for batch in batches)
    thread.put(ev.FinishBatches(batches, updates, 1))
    known = {tuple(key) for batch in batches for key in batch.keys}
    batch = scene.draw(thread).batches[0]
    assert {tuple(key) for key in batch.keys} <= known  # 80 draws of about 20 items
    wanted = batch.keys[:, 2] % 3 + 1.0
    np.testing.assert_allclose(batch.probabilities / batch.probabilities[0], wanted / wanted[0], rtol=1e-5)


@pytest.mark.parametrize("error", [RlframeError("It is gone."), OSError("no such memory")], ids=str)
def test_a_draw_that_raises_is_answered_and_the_next_one_is_as_ever(scene: Scene, error: Exception) -> None:
    buffer = scene.buffer()
    fill(buffer)
    thread, draw = scene.thread(buffer), buffer.draw
    buffer.draw = raising(error)
    drawn = scene.draw(thread, 2)
    assert drawn.batches == () and drawn.why == f"{type(error).__name__}: {error}"
    buffer.draw = draw
    assert len(scene.draw(thread, 2).batches) == 2


def test_what_was_drawn_before_it_raised_is_learned_from(scene: Scene) -> None:
    buffer = scene.buffer()
    fill(buffer)
    thread, draw, left = scene.thread(buffer), buffer.draw, [1, 1]

    def draws_two(timeout: float) -> Any:
        left.pop()
        return draw(timeout)

    buffer.draw = draws_two
    assert len(scene.draw(thread, 5).batches) == 2


def test_a_settlement_that_raises_does_not_end_the_thread(scene: Scene) -> None:
    buffer = scene.buffer()
    fill(buffer)
    thread = scene.thread(buffer)
    batches = scene.draw(thread).batches
    buffer.release = raising(ValueError("boom"))
    thread.put(ev.FinishBatches(batches, ()))
    assert len(scene.draw(thread).batches) == 1


def test_versions_are_pinned_and_let_go_and_a_store_that_raises_has_none(scene: Scene) -> None:
    thread = scene.thread(scene.buffer())
    thread.put(ev.Pin("evaluate/1", "main"))
    assert scene.next() == ev.Pinned("evaluate/1", "main", 5) and scene.store.pins == [5]
    thread.put(ev.Unpin("main", 5))
    scene.store.raises = OSError("gone")
    thread.put(ev.Pin("evaluate/2", "main"))
    assert scene.next() == ev.Pinned("evaluate/2", "main", -1) and scene.store.pins == []


def test_the_replay_is_saved_at_the_end_and_found_again(scene: Scene) -> None:
    first = scene.buffer()
    fill(first)
    thread = scene.thread(first)
    batches = scene.draw(thread, 10).batches
    thread.put(ev.FinishBatches(batches, tuple(Update(b.keys, b.keys[:, 2] + 1.0) for b in batches), 1))
    thread.close()
    assert thread.stats["items"] == first.size > 0 and thread.stats["kind"] == "prioritized"
    second = scene.buffer()
    scene.thread(second)
    assert second.size == first.size
    want, got = first.draw(), second.draw()
    np.testing.assert_array_equal(want.keys, got.keys)
    np.testing.assert_allclose(want.probabilities, got.probabilities)


def test_it_is_saved_when_it_is_asked_to_be_and_one_file_stays(scene: Scene) -> None:
    buffer = scene.buffer()
    fill(buffer)
    thread = scene.thread(buffer)
    scene.flush(thread)
    for number in (1, 2):
        thread.put(ev.SaveReplay())
        scene.flush(thread)
        assert [path.name for path in scene.path.iterdir()] == [str(number)]


def test_a_damaged_file_is_named_before_anything_begins(scene: Scene) -> None:
    scene.path.mkdir()
    (scene.path / "3").write_bytes(b"\x00" * 100)
    with pytest.raises(CheckpointError, match="replay/3"):
        scene.thread(scene.buffer())


def test_items_too_old_for_a_queue_are_let_go(scene: Scene) -> None:
    buffer = scene.buffer("queue", Sequence(2), max_staleness=2)
    fill(buffer, 6)
    thread = scene.thread(buffer)
    drawn = scene.draw(thread).batches
    thread.put(ev.FinishBatches(drawn, tuple(Update(batch.keys) for batch in drawn), 10**6))
    scene.flush(thread)
    assert scene.draw(thread).batches == () and buffer.stats()["evicted"] > 0
