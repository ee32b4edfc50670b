"""Tests of the functions that choose units for exactly full batches. Some tests compare with a brute-force search."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from rlframe.trajectories.queue.unit_queues import (
    QueuedGroup,
    UndersizedGroups,
    can_fill,
    oldest_fitting_size,
    usable_sizes,
)

counts_of_sizes = st.dictionaries(st.integers(1, 9), st.integers(0, 4), max_size=4)


def fillings(target, counts):
    """Yield each selection of units whose sizes sum to the target, as {size: number of units}."""
    sizes = list(counts)
    for chosen in product(*(range(counts[size] + 1) for size in sizes)):
        if sum(size * n for size, n in zip(sizes, chosen)) == target:
            yield dict(zip(sizes, chosen))


def test_can_fill_requires_exact_sum():
    assert can_fill(8, {3: 1, 5: 1})
    assert not can_fill(8, {3: 2, 4: 1})  # The possible sums are 3, 4, 6, 7 and 10.
    assert not can_fill(8, {5: 100})
    assert can_fill(0, {})
    assert not can_fill(-1, {1: 1})


def test_removed_unit_is_not_used_for_filling():
    assert can_fill(8, {3: 1, 5: 1})
    assert not can_fill(8, {3: 1, 5: 1}, spent=5)


def test_usable_sizes_are_sizes_in_any_full_batch():
    assert usable_sizes(8, {3: 1, 5: 1, 7: 9}) == {3, 5}
    assert usable_sizes(8, {16: 3}) == set()


def test_size_of_oldest_unit_is_chosen_if_other_units_can_fill_the_rest():
    age = {3: 1, 4: 2, 5: 3}.__getitem__
    assert oldest_fitting_size(8, {3: 1, 4: 2}, age) == 4  # After a unit of 3, the remaining 5 cannot be filled.
    assert oldest_fitting_size(8, {3: 1, 4: 2, 5: 1}, age) == 3
    assert oldest_fitting_size(7, {4: 1}, age) is None


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 24), counts_of_sizes)
def test_can_fill_and_usable_sizes_match_brute_force(target, counts):
    found = list(fillings(target, counts))
    assert can_fill(target, counts) == bool(found)
    assert usable_sizes(target, counts) == {size for filling in found for size, n in filling.items() if n}


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 24), counts_of_sizes, st.permutations(range(1, 10)))
def test_oldest_fitting_size_matches_brute_force(target, counts, ages):
    fitting = [size for filling in fillings(target, counts) for size, n in filling.items() if n]
    expected = min(fitting, key=lambda size: ages[size - 1], default=None)
    assert oldest_fitting_size(target, counts, lambda size: ages[size - 1]) == expected


def test_cost_is_independent_of_number_of_units():
    assert can_fill(1000, {7: 10**6, 13: 10**6})
    assert not can_fill(1000, {14: 10**6, 21: 10**6})


def group(i, sequences):
    return QueuedGroup(i, sequences, 1, None, 0.0)


def test_unit_uses_oldest_undersized_groups_first():
    undersized = UndersizedGroups()
    assert [undersized.add(group(i, size), 8) for i, size in enumerate([3, 3, 1])] == [None] * 3
    unit = undersized.add(group(3, 4), 8)  # The new unit has three groups, of 3, 1 and 4 sequences.
    assert [part.id for part in unit.groups] == [0, 2, 3]
    assert (unit.id, unit.sequences, len(undersized), undersized.sequences) == (3, 8, 1, 3)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 12), st.lists(st.integers(1, 11), max_size=25))
def test_sizes_of_remaining_undersized_groups_never_sum_to_unit_size(unit_size, sizes):
    undersized = UndersizedGroups()
    inside = {}
    for i, size in enumerate(min(size, unit_size - 1) for size in sizes):
        inside[i] = size
        unit = undersized.add(group(i, size), unit_size)
        if unit is not None:
            ids = [part.id for part in unit.groups]
            assert ids == sorted(ids)
            assert sum(inside.pop(j) for j in ids) == unit_size
        sums = {0}
        for waiting in inside.values():
            sums |= {total + waiting for total in sums}
        assert unit_size not in sums
        assert (len(undersized), undersized.sequences) == (len(inside), sum(inside.values()))
    assert [waiting.id for waiting in UndersizedGroups(undersized.oldest_first()).oldest_first()] == sorted(inside)
