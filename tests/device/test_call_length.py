"""The number of rounds of a call follows the durations of the calls before it."""

from __future__ import annotations

import pytest

from rlframe.device.driver import MOST_PER_CALL, CallLength


def compiled() -> CallLength:
    length = CallLength()
    length.choose(1, seconds=9.0)  # this call compiled
    assert length.count == 1
    return length


def test_call_takes_half_a_second_and_grows_at_most_tenfold():
    length, counts = compiled(), []
    for _ in range(4):
        length.choose(length.count, seconds=0.001 * length.count)
        counts.append(length.count)
    assert counts == [10, 100, 500, 500]
    length.choose(500, seconds=50.0)
    assert length.count == 5
    length.choose(5, seconds=50.0)
    assert length.count == 1
    length.choose(0, seconds=50.0)
    assert length.count == 1


def test_call_that_ends_early_does_not_limit_the_next_one():
    length = compiled()
    for _ in range(4):
        length.choose(length.count, seconds=0.001 * length.count)
    length.choose(2, seconds=0.002)
    assert length.count == 500


def test_first_updates_start_the_choice_again():
    length = compiled()
    for _ in range(3):
        assert length.enough_updates == 1
        length.choose(length.count, seconds=1e-5 * length.count)
    assert length.count == 1000
    length.choose(400, seconds=0.1, updates=1)
    assert (length.count, length.enough_updates) == (1, MOST_PER_CALL)
    length.choose(1, seconds=0.01, updates=1)
    assert length.count == 10


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_number_of_rounds_fits_into_32_bits(seconds):
    length = compiled()
    for _ in range(20):
        length.choose(length.count, seconds)
    assert length.count <= MOST_PER_CALL
