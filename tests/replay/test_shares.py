"""When a batch of one item per environment is due, and whom it waits for."""

from __future__ import annotations

import pytest

from rlframe.replay import shares
from rlframe.replay.shares import Shares, WriterState


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(shares, "time", made)
    return made


def writers(*steps: int, dead: tuple[int, ...] = ()) -> dict[int, WriterState]:
    """Of four environments each, which have taken so many steps."""
    return {rank: WriterState(4, count, lambda rank=rank: rank not in dead) for rank, count in enumerate(steps)}


def test_a_batch_is_due_when_every_share_is_there(clock: Clock) -> None:
    both = Shares(10.0)
    assert both.due(writers(8, 8), {}) == 0
    assert both.due(writers(16, 8), {0: 4}) == 0
    assert both.due(writers(16, 15), {0: 4, 1: 3}) == 0
    assert both.due(writers(16, 16), {0: 4, 1: 4}) == 8


def test_the_share_of_a_writer_that_stands_still_lapses_until_it_moves(clock: Clock) -> None:
    both = Shares(10.0)
    assert both.due(writers(16, 8), {0: 4}) == 0
    clock.now += 9.0
    assert both.due(writers(16, 9), {0: 4}) == 0  # slow, but not still
    clock.now += 9.0
    assert both.due(writers(16, 9), {0: 4}) == 0
    clock.now += 2.0
    assert both.due(writers(16, 9), {0: 4}) == 4
    assert both.expected(writers(16, 9)) == 4
    assert both.due(writers(32, 9), {0: 4}) == 4  # at once
    assert both.due(writers(48, 10), {0: 4}) == 0
    assert both.expected(writers(48, 10)) == 8


def test_a_dead_writer_is_not_waited_for_and_one_that_has_yet_to_begin_for_longer(clock: Clock) -> None:
    three = Shares(10.0)
    there = writers(16, 8, 0, dead=(1,))
    assert three.due(there, {0: 4}) == 0
    clock.now += 19.0
    assert three.due(there, {0: 4}) == 0
    clock.now += 2.0
    assert three.due(there, {0: 4}) == 4


def test_nobodys_share_lapses_while_nobody_waits(clock: Clock) -> None:
    both = Shares(10.0)
    assert both.due(writers(8, 8), {}) == 0
    clock.now += 100.0  # an update took so long
    assert both.due(writers(8, 8), {}) == 0
    assert both.due(writers(16, 8), {0: 4}) == 0
    clock.now += 9.0
    assert both.due(writers(16, 8), {0: 4}) == 0
