"""Tests of the rate limiter. It decides when a batch may be sampled, and when writers must wait.

A writer has lapsed if batches no longer wait for its items, because it is dead or makes no progress.
"""

from __future__ import annotations

import pytest

from rlframe.errors import UsageError
from rlframe.replay.rate_limiter import ItemCounts, RateLimiter, WriterQuorum, WriterState
from rlframe.types import ReplaySpec, Transition


def limiter(kind: str, batch_size: int | None = 8, **options: object) -> RateLimiter:
    return RateLimiter(ReplaySpec(kind, Transition(1), batch_size, 1000, **options))


def test_replay_may_be_sampled_after_min_size_inserts() -> None:
    uniform = limiter("uniform", min_size=10)
    assert not uniform.may_sample(8, ItemCounts(9, 9, 0))
    assert uniform.may_sample(8, ItemCounts(3, 10, 10**6))  # 10 items were added, and 7 of them were evicted
    assert not uniform.may_sample(8, ItemCounts(0, 10, 0))
    assert uniform.inserts_needed(ItemCounts(9, 9, 0), dict) == 10
    assert uniform.inserts_needed(ItemCounts(0, 20, 0), dict) == 21


def test_queue_may_be_sampled_while_it_has_a_batch_and_min_size_items() -> None:
    queue = limiter("queue", min_size=10)
    assert not queue.may_sample(8, ItemCounts(9, 900, 0))
    assert queue.may_sample(8, ItemCounts(10, 900, 0))
    assert not queue.may_sample(12, ItemCounts(11, 900, 0))
    assert queue.inserts_needed(ItemCounts(9, 900, 0), dict) == 901
    assert limiter("queue", batch_size=12, min_size=10).inserts_needed(ItemCounts(9, 900, 0), dict) == 903


@pytest.mark.parametrize("ratio", [0.0, -1.0])
def test_ratio_that_would_never_allow_a_sample_is_refused(ratio: float) -> None:
    with pytest.raises(UsageError, match=f"ReplaySpec.samples_per_insert must be above 0, got {ratio}"):
        limiter("uniform", samples_per_insert=ratio)


def test_samples_per_insert_limits_samples_and_inserts() -> None:
    paced = limiter("uniform", min_size=10, samples_per_insert=2.0)
    assert paced.may_sample(8, ItemCounts(10, 10, 0))  # the first batch is available after `min_size` inserts
    assert not paced.may_sample(8, ItemCounts(13, 13, 8))
    assert paced.may_sample(8, ItemCounts(14, 14, 8))
    assert paced.inserts_needed(ItemCounts(13, 13, 8), dict) == 14
    assert paced.may_insert(inserted=18, sampled=0, run_ahead=8)
    assert not paced.may_insert(inserted=19, sampled=0, run_ahead=8)
    assert paced.may_insert(inserted=19, sampled=8, run_ahead=8)


@pytest.mark.parametrize("run_ahead", [0, 8])
def test_reverb_bounds_allow_the_same_samples_and_inserts(run_ahead: int) -> None:
    paced = limiter("uniform", min_size=10, samples_per_insert=2.0)
    least, most = paced.reverb_bounds(8, run_ahead)
    for inserted in range(10, 40):
        for sampled in range(0, 60, 8):
            diff = 2.0 * inserted - sampled
            assert (diff - 8 >= least) == paced.may_sample(8, ItemCounts(inserted, inserted, sampled))
            if run_ahead:
                assert (diff <= most) == paced.may_insert(inserted, sampled, run_ahead)
    assert most - least >= 4.0  # otherwise writers and readers could both be blocked


def test_items_to_sample_is_a_whole_batch_or_zero() -> None:
    def unasked() -> dict:
        raise AssertionError("the limiter must not need this argument")

    assert limiter("uniform").items_to_sample(ItemCounts(9, 9, 0), unasked, unasked) == 8
    assert limiter("queue").items_to_sample(ItemCounts(7, 7, 0), unasked, unasked) == 0
    assert limiter("queue", None).items_to_sample(ItemCounts(4, 4, 0), lambda: writers(16), unasked) == 4
    assert limiter("queue", None).items_to_sample(ItemCounts(3, 3, 0), lambda: writers(16), unasked) == 0
    assert limiter("uniform", min_size=10).items_to_sample(ItemCounts(9, 9, 0), unasked, unasked) == 0


def test_batch_of_one_item_per_environment_excludes_a_dead_writer() -> None:
    there = writers(16, 8, dead=(1,))
    assert limiter("queue", None).items_to_sample(ItemCounts(4, 4, 0), lambda: there, lambda: {0: 4}) == 4
    assert limiter("queue", None).items_to_sample(ItemCounts(4, 4, 0), lambda: writers(16, 8), lambda: {0: 4}) == 0
    assert limiter("queue", None, min_size=5).items_to_sample(ItemCounts(4, 4, 0), lambda: there, lambda: {0: 4}) == 0
    yet_to_come = {**writers(16), 1: WriterState(0, 0, lambda: True)}
    assert limiter("queue", None).items_to_sample(ItemCounts(4, 4, 0), lambda: yet_to_come, lambda: {0: 4}) == 0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def writers(*steps: int, dead: tuple[int, ...] = ()) -> dict[int, WriterState]:
    """Return the states of writers with four environments each. Writer i has taken `steps[i]` steps."""
    return {rank: WriterState(4, count, lambda rank=rank: rank not in dead) for rank, count in enumerate(steps)}


def test_batch_is_complete_when_each_writer_has_all_its_items(clock: Clock) -> None:
    both = WriterQuorum(10.0, clock)
    assert both.complete_items(writers(8, 8), {}) == 0
    assert both.complete_items(writers(16, 8), {0: 4}) == 0
    assert both.complete_items(writers(16, 15), {0: 4, 1: 3}) == 0
    assert both.complete_items(writers(16, 16), {0: 4, 1: 4}) == 8


def test_writer_without_progress_lapses_until_it_makes_progress(clock: Clock) -> None:
    both = WriterQuorum(10.0, clock)
    assert both.complete_items(writers(16, 8), {0: 4}) == 0
    clock.now += 9.0
    assert both.complete_items(writers(16, 9), {0: 4}) == 0  # writer 1 is slow, but makes progress
    clock.now += 9.0
    assert both.complete_items(writers(16, 9), {0: 4}) == 0
    clock.now += 2.0
    assert both.complete_items(writers(16, 9), {0: 4}) == 4
    assert both.expected(writers(16, 9)) == 4
    assert both.complete_items(writers(32, 9), {0: 4}) == 4  # the batch does not wait for writer 1
    assert both.complete_items(writers(48, 10), {0: 4}) == 0
    assert both.expected(writers(48, 10)) == 8


def test_dead_writer_lapses_at_once_but_a_starting_writer_lapses_later(clock: Clock) -> None:
    three = WriterQuorum(10.0, clock)
    there = writers(16, 8, 0, dead=(1,))
    assert three.complete_items(there, {0: 4}) == 0
    clock.now += 19.0
    assert three.complete_items(there, {0: 4}) == 0
    clock.now += 2.0
    assert three.complete_items(there, {0: 4}) == 4


def test_no_writer_lapses_if_no_items_are_waiting(clock: Clock) -> None:
    both = WriterQuorum(10.0, clock)
    assert both.complete_items(writers(8, 8), {}) == 0
    clock.now += 100.0  # an update of the learner took 100 s
    assert both.complete_items(writers(8, 8), {}) == 0
    assert both.complete_items(writers(16, 8), {0: 4}) == 0
    clock.now += 9.0
    assert both.complete_items(writers(16, 8), {0: 4}) == 0
