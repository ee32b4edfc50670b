"""Tests of the coordinator's replay thread, with a real replay buffer in shared memory."""

from __future__ import annotations

import pathlib
import queue
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.messages import Header, Update
from rlframe.coordinator.threads import ReplayThread
from rlframe.errors import CheckpointError, RlframeError
from rlframe.replay import SharedMemReplayBuffer
from rlframe.testing.streams import StepStream, fake_agent
from rlframe.types import Sequence, Transition

WITHIN = 60.0  # seconds
ONE = Transition(1)


class Store:
    """A fake param store that records pins."""

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


class ReplayThreads:
    """A factory of replay buffers and replay threads. It collects the events."""

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
        """Wait until the thread has carried out all earlier effects."""
        thread.put(ev.Pin("evaluate/1", "main"))
        assert isinstance(self.next(), ev.Pinned)


@pytest.fixture
def threads(tmp_path: pathlib.Path) -> Iterator[ReplayThreads]:
    threads = ReplayThreads(tmp_path / "replay")
    yield threads
    for thread in threads.threads:
        thread.close()
    for buffer in threads.buffers:
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


def test_drawn_keys_can_be_fetched(threads: ReplayThreads) -> None:
    buffer = threads.buffer()
    fill(buffer)
    drawn = threads.draw(threads.thread(buffer), 3)
    assert [batch.keys.shape for batch in drawn.batches] == [(4, 3)] * 3 and drawn.why == ""
    for batch in drawn.batches:
        fetched = buffer.fetch(batch.keys, batch.probabilities)
        np.testing.assert_array_equal(fetched.keys, batch.keys)


def test_no_batch_is_drawn_from_an_empty_buffer(threads: ReplayThreads) -> None:
    drawn = threads.draw(threads.thread(threads.buffer()), 3)
    assert drawn.batches == () and drawn.why == ""


def test_draw_from_a_queue_returns_all_available_batches(threads: ReplayThreads) -> None:
    buffer = threads.buffer("queue")
    fill(buffer, 6)
    there = buffer.size // 4
    assert there >= 2
    thread = threads.thread(buffer)
    drawn = threads.draw(thread, 30)
    assert len(drawn.batches) == there
    thread.put(ev.FinishBatches(drawn.batches, ()))
    threads.flush(thread)
    thread.close()
    stats = thread.stats
    assert stats["added"] == stats["items"] + stats["evicted"] + stats["sampled"] and stats["sampled"] == 4 * there


def test_finished_batches_set_priorities(threads: ReplayThreads) -> None:
    buffer = threads.buffer(priority_exponent=1.0)
    fill(buffer)
    thread = threads.thread(buffer)
    batches = threads.draw(thread, 20).batches
    updates = tuple(Update(batch.keys, batch.keys[:, 2] % 3 + 1.0) for batch in batches)
    thread.put(ev.FinishBatches(batches, updates, 1))
    known = {tuple(key) for batch in batches for key in batch.keys}
    batch = threads.draw(thread).batches[0]
    assert {tuple(key) for key in batch.keys} <= known  # all items are known after 80 draws from about 20 items
    wanted = batch.keys[:, 2] % 3 + 1.0
    np.testing.assert_allclose(batch.probabilities / batch.probabilities[0], wanted / wanted[0], rtol=1e-5)


@pytest.mark.parametrize("error", [RlframeError("It is gone."), OSError("no such memory")], ids=str)
def test_failed_draw_is_reported_and_the_next_draw_works(threads: ReplayThreads, error: Exception) -> None:
    buffer = threads.buffer()
    fill(buffer)
    thread, draw = threads.thread(buffer), buffer.draw
    buffer.draw = raising(error)
    drawn = threads.draw(thread, 2)
    assert drawn.batches == () and drawn.why == f"{type(error).__name__}: {error}"
    buffer.draw = draw
    assert len(threads.draw(thread, 2).batches) == 2


def test_batches_drawn_before_an_exception_are_returned(threads: ReplayThreads) -> None:
    buffer = threads.buffer()
    fill(buffer)
    thread, draw, left = threads.thread(buffer), buffer.draw, [1, 1]

    def draws_two(timeout: float) -> Any:
        left.pop()
        return draw(timeout)

    buffer.draw = draws_two
    assert len(threads.draw(thread, 5).batches) == 2


def test_exception_while_finishing_batches_does_not_end_the_thread(threads: ReplayThreads) -> None:
    buffer = threads.buffer()
    fill(buffer)
    thread = threads.thread(buffer)
    batches = threads.draw(thread).batches
    buffer.release = raising(ValueError("boom"))
    thread.put(ev.FinishBatches(batches, ()))
    assert len(threads.draw(thread).batches) == 1


def test_versions_are_pinned_and_unpinned_and_a_failed_pin_gives_minus_1(threads: ReplayThreads) -> None:
    thread = threads.thread(threads.buffer())
    thread.put(ev.Pin("evaluate/1", "main"))
    assert threads.next() == ev.Pinned("evaluate/1", "main", 5) and threads.store.pins == [5]
    thread.put(ev.Unpin("main", 5))
    threads.store.raises = OSError("gone")
    thread.put(ev.Pin("evaluate/2", "main"))
    assert threads.next() == ev.Pinned("evaluate/2", "main", -1) and threads.store.pins == []


def test_buffer_is_saved_at_the_end_and_restored(threads: ReplayThreads) -> None:
    first = threads.buffer()
    fill(first)
    thread = threads.thread(first)
    batches = threads.draw(thread, 10).batches
    thread.put(ev.FinishBatches(batches, tuple(Update(b.keys, b.keys[:, 2] + 1.0) for b in batches), 1))
    thread.close()
    assert thread.stats["items"] == first.size > 0 and thread.stats["kind"] == "prioritized"
    second = threads.buffer()
    threads.thread(second)
    assert second.size == first.size
    want, got = first.draw(), second.draw()
    np.testing.assert_array_equal(want.keys, got.keys)
    np.testing.assert_allclose(want.probabilities, got.probabilities)


def test_requested_save_replaces_the_last_file(threads: ReplayThreads) -> None:
    buffer = threads.buffer()
    fill(buffer)
    thread = threads.thread(buffer)
    threads.flush(thread)
    for number in (1, 2):
        thread.put(ev.SaveReplay())
        threads.flush(thread)
        assert [path.name for path in threads.path.iterdir()] == [str(number)]


def test_damaged_file_is_reported_at_start(threads: ReplayThreads) -> None:
    threads.path.mkdir()
    (threads.path / "3").write_bytes(b"\x00" * 100)
    with pytest.raises(CheckpointError, match="replay/3"):
        threads.thread(threads.buffer())


def test_too_old_items_of_a_queue_are_evicted(threads: ReplayThreads) -> None:
    buffer = threads.buffer("queue", Sequence(2), max_staleness=2)
    fill(buffer, 6)
    thread = threads.thread(buffer)
    drawn = threads.draw(thread).batches
    thread.put(ev.FinishBatches(drawn, tuple(Update(batch.keys) for batch in drawn), 10**6))
    threads.flush(thread)
    assert threads.draw(thread).batches == () and buffer.stats()["evicted"] > 0
