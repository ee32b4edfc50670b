"""Tests of fetching items by their keys: one process writes, another process draws, and a third process fetches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe.errors import UsageError
from rlframe.replay.shared_memory import block
from rlframe.types import Sequence, Transition
from tests.replay import processes
from tests.replay.processes import DEADLINE, Process, assert_whole, expected_ids
from tests.replay.test_shared_memory import Resources, steps_of
from tests.waiting import wait_until


@pytest.fixture
def resources() -> Iterator[Resources]:
    made = Resources()
    yield made
    for process in made.processes:
        process.kill()
        process.end()
    for buffer in made.made:
        buffer.close()


def ask(process: Process, *what: Any) -> Any:
    process.send_line(*what)
    return process.read_line()


def draw(drawer: Process, timeout: float = 0.2) -> tuple[np.ndarray, np.ndarray] | None:
    answer = ask(drawer, "draw", timeout)
    return None if answer is None else (np.array(answer[0], np.int64), np.array(answer[1], np.float32))


def release(drawer: Process, drawn: tuple[np.ndarray, np.ndarray]) -> None:
    ask(drawer, "release", drawn[0].tolist())


def assert_adds_up(stats: dict[str, int]) -> None:
    assert stats["added"] == stats["items"] + stats["evicted"] + stats["sampled"]


@pytest.mark.system
@pytest.mark.parametrize("item", [Transition(1), Sequence(4, 3)], ids=str)
def test_each_item_is_fetched_once_while_writers_run_at_full_speed(resources: Resources, item: Any) -> None:
    buffer = resources.buffer("queue", item, 10, 60, num_writers=2, timeout=DEADLINE)
    drawer = resources.process(processes.draw_on_request, buffer)
    assert draw(drawer) is None
    writers = [resources.process(processes.write, buffer, 2, 150, rank) for rank in (0, 1)]
    seen: list[int] = []
    held: list[Any] = []  # drawn batches that are not fetched yet
    while True:
        are_done = all(writer.popen.poll() is not None for writer in writers)
        drawn = draw(drawer)
        if drawn is not None:
            held.append(drawn)
        elif are_done and not held:
            break
        if held and (drawn is None or len(held) > 2):
            batch = buffer.fetch(*held[0])
            seen += assert_whole(batch, item).tolist()
            release(drawer, held.pop(0))
    expected = expected_ids(item, 0, 0, 2, 150) | expected_ids(item, 1, 0, 2, 150)
    assert len(seen) == len(set(seen))
    assert set(seen) <= expected
    stats = ask(drawer, "stats")
    assert_adds_up(stats)
    assert stats["added"] == len(expected)
    assert stats["sampled"] == len(seen) > len(expected) - 20
    assert stats["evicted"] == 0
    assert buffer._view().memory.sampler.pid == drawer.popen.pid  # fetching does not make this process the sampler
    with pytest.raises(UsageError, match=f"process {drawer.popen.pid} samples it"):
        buffer.draw()


def test_writer_waits_until_drawn_items_are_released(resources: Resources) -> None:
    buffer = resources.buffer("queue", Transition(1), 10, 40, timeout=DEADLINE)
    drawer = resources.process(processes.draw_on_request, buffer)
    assert draw(drawer) is None
    writer = resources.process(processes.write, buffer, 1, 400)
    held = list(iter(lambda: draw(drawer), None))
    memory = buffer._view().memory
    header = memory.headers[0]
    wait_until(lambda: header[block.IS_WAITING] == 1)
    held += list(iter(lambda: draw(drawer), None))  # draw until the queue is empty
    stands_at = memory.cursors_of(0).steps
    assert stands_at < 200
    for drawn in reversed(held):
        assert_whole(buffer.fetch(*drawn), Transition(1))
    for drawn in held[1:]:
        release(drawer, drawn)
    assert header[block.IS_WAITING] == 1  # the oldest items are not released yet
    assert memory.cursors_of(0).steps == stands_at
    release(drawer, held[0])
    wait_until(lambda: memory.cursors_of(0).steps > stands_at)
    assert buffer.fetch(*held[0]) is None or header[block.FLOOR] <= held[0][0][:, 2].min()
    while writer.popen.poll() is None:
        if (drawn := draw(drawer)) is not None:
            release(drawer, drawn)
    assert_adds_up(ask(drawer, "stats"))


def test_items_drawn_by_a_dead_process_are_not_drawn_again(resources: Resources) -> None:
    item = Transition(2)
    buffer = resources.buffer("queue", item, 20, 300, num_writers=2, timeout=DEADLINE)
    drawer = resources.process(processes.draw_on_request, buffer)
    assert draw(drawer) is None
    writers = [resources.process(processes.write, buffer, 3, 200, rank) for rank in (0, 1)]
    draws: list[Any] = []
    while len(draws) < 5:
        if (drawn := draw(drawer)) is not None:
            draws.append(drawn)
    release(drawer, draws[0])
    header = buffer._view().memory.headers
    wait_until(lambda: header[0][block.IS_WAITING] == header[1][block.IS_WAITING] == 1)
    for drawn in draws[1:]:
        assert_whole(buffer.fetch(*drawn), item)
    drawer.kill()
    keys = [tuple(key) for drawn in draws for key in drawn[0].tolist()]
    following = resources.process(processes.draw_on_request, buffer)
    seen: list[int] = []
    while True:  # the writers continue, and may overwrite the items that the killed process drew
        are_done = all(writer.popen.poll() is not None for writer in writers)
        if (drawn := draw(following)) is not None:
            keys += [tuple(key) for key in drawn[0].tolist()]
            seen += assert_whole(buffer.fetch(*drawn), item).tolist()
            release(following, drawn)
        elif are_done:
            break
    assert len(keys) == len(set(keys))
    expected = expected_ids(item, 0, 0, 3, 200) | expected_ids(item, 1, 0, 3, 200)
    stats = ask(following, "stats")
    assert_adds_up(stats)
    assert stats["evicted"] == 0
    assert stats["sampled"] == len(keys) == len(seen) + 100
    assert stats["added"] == len(expected)
    assert buffer.fetch(*draws[1]) is None  # some items were overwritten, so there is no batch


@pytest.mark.system
def test_items_are_drawn_once_and_counted_correctly_if_sampler_processes_are_killed(
    resources: Resources,
) -> None:
    item = Transition(1)
    buffer = resources.buffer("queue", item, 20, 200, num_writers=2, timeout=DEADLINE)
    writers = [resources.process(processes.write, buffer, 4, 300, rank) for rank in (0, 1)]
    keys: list[tuple[int, ...]] = []
    for count in (2, 5, 11, 21):
        drawer = resources.process(processes.draw_until_killed, buffer)
        for _ in range(count):
            keys += [tuple(key) for key in drawer.read_line()]
        drawer.kill()
        while (said := drawer.read_line()) is not None:
            keys += [tuple(key) for key in said]
    following = resources.process(processes.draw_on_request, buffer)
    while True:
        are_done = all(writer.popen.poll() is not None for writer in writers)
        if (drawn := draw(following)) is not None:
            keys += [tuple(key) for key in drawn[0].tolist()]
            assert_whole(buffer.fetch(*drawn), item)
            release(following, drawn)
        elif are_done:
            break
    assert len(keys) == len(set(keys))
    stats = ask(following, "stats")
    assert_adds_up(stats)
    assert stats["added"] == sum(len(expected_ids(item, rank, 0, 4, 300)) for rank in (0, 1))
    # A process may be killed after it has drawn items and before it prints them. They count as sampled or evicted.
    assert 0 <= stats["sampled"] + stats["evicted"] - len(keys) <= 4 * 20
    assert stats["evicted"] >= 0


@pytest.mark.system
def test_new_sampler_process_draws_all_remaining_items_after_the_ring_wrapped(resources: Resources) -> None:
    buffer = resources.buffer("queue", Transition(1), 20, 100, timeout=DEADLINE)
    drawer = resources.process(processes.draw_on_request, buffer)
    assert draw(drawer) is None
    writer = resources.process(processes.write, buffer, 2, 300)
    draws: list[Any] = []
    while len(draws) < 15:
        if (drawn := draw(drawer)) is not None:
            draws.append(drawn)
            release(drawer, drawn)
    header = buffer._view().memory.headers[0]
    wait_until(lambda: header[block.IS_WAITING] == 1)
    assert header[block.FLOOR] > header[block.SLOTS]
    draws.append(draw(drawer))  # the queue was full, so most items remain in it
    drawer.kill()
    following = resources.process(processes.draw_on_request, buffer)
    while True:
        is_done = writer.popen.poll() is not None
        if (drawn := draw(following)) is not None:
            draws.append(drawn)
            release(following, drawn)
        elif is_done:
            break
    stats = ask(following, "stats")
    assert_adds_up(stats)
    assert stats["evicted"] == 0
    assert stats["sampled"] == 20 * len(draws) == stats["added"] // 20 * 20


@pytest.mark.system
@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_late_fetch_returns_only_complete_items_while_the_ring_wraps(resources: Resources, kind: str) -> None:
    buffer = resources.buffer(kind, Transition(3, 0.9), 64, 400)
    drawer = resources.process(processes.draw_on_request, buffer)
    writer = resources.process(processes.write_until_stopped, buffer, 4)
    writer.read_line()
    memory = buffer._view().memory
    late = gone = whole = 0
    while not (late and gone and whole) or whole + late < 20:
        if (drawn := draw(drawer)) is None:
            continue
        target = memory.cursors_of(0).head + (0, 200, 10_000)[(late + gone + whole) % 3]
        wait_until(lambda target=target: memory.cursors_of(0).head >= target)
        batch = buffer.fetch(*drawn)
        if batch is None:
            gone += 1
            continue
        assert_whole(batch, Transition(3, 0.9))
        same = (batch.keys == drawn[0]).all(axis=1)
        assert set(map(tuple, batch.keys.tolist())) == set(map(tuple, drawn[0][same].tolist()))
        whole, late = whole + same.all(), late + (not same.all())
    assert ask(drawer, "stats")["sampled"] >= 64 * 20
    os.kill(writer.popen.pid, 9)


@pytest.mark.system
def test_sampler_process_can_save_and_restore_while_another_process_fetches(
    resources: Resources, tmp_path: Path
) -> None:
    item, path = Transition(1), str(tmp_path / "replay")
    buffer = resources.buffer("queue", item, 10, 200, timeout=DEADLINE)
    drawer = resources.process(processes.draw_on_request, buffer)
    assert draw(drawer) is None
    resources.process(processes.write, buffer, 2, 40)
    wait_until(lambda: buffer.stats()["steps"] == 80)
    drawn = [draw(drawer) for _ in range(3)]
    release(drawer, drawn[0])
    with pytest.raises(UsageError, match="samples it"):
        buffer.save(path)
    assert ask(drawer, "save", path) is None
    assert_whole(buffer.fetch(*drawn[2]), item)
    before = ask(drawer, "stats")
    other = resources.buffer("queue", item, 10, 200, timeout=DEADLINE)
    following = resources.process(processes.draw_on_request, other)
    assert ask(following, "restore", path) is None
    after = ask(following, "stats")
    assert after == {**before, "bytes": after["bytes"]}
    assert_adds_up(after)
    keys = [tuple(key) for one in drawn for key in one[0].tolist()]
    while (one := draw(following)) is not None:  # items drawn before the save are not drawn again
        assert_whole(other.fetch(*one), item)
        keys += [tuple(key) for key in one[0].tolist()]
    assert len(keys) == len(set(keys)) == before["added"] // 10 * 10


def test_batch_needs_items_of_a_writer_that_waits_for_a_release(resources: Resources) -> None:
    buffer = resources.buffer("queue", Sequence(2), None, 200, num_writers=2, lapse_after=0.01)
    for rank, num_envs in ((0, 3), (1, 2)):
        buffer.claim_rank(num_envs, rank)
    streams = [steps_of(0, 3, 10), steps_of(1, 2, 10)]
    for steps in (*streams, *streams):
        buffer.add(*next(steps))
    drawn = buffer.draw()
    assert sorted(drawn.keys[:, 0].tolist()) == [0, 0, 0, 1, 1]
    for _ in range(2):
        buffer.add(*next(streams[0]))
    header = buffer._view().memory.headers[1]
    header[block.IS_WAITING] = 1  # simulate a writer that waits for `release`
    assert [buffer.draw(timeout=0.02) for _ in range(5)] == [None] * 5
    buffer.release(drawn.keys)
    following = wait_until(lambda: buffer.draw(timeout=0.02))  # now the batch does not wait for this writer
    assert following.keys[:, 0].tolist() == [0, 0, 0]
