from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlframe.trajectories.stores.payload_file import BLOCK, ExtentAllocator


def test_smallest_sufficient_extent_is_reused():
    extents = ExtentAllocator(BLOCK)
    large, _, small, _ = (extents.take(blocks * BLOCK) for blocks in (5, 1, 2, 1))
    extents.give_back(large, 5 * BLOCK)
    extents.give_back(small, 2 * BLOCK)
    assert extents.take(BLOCK + 1) == small
    assert extents.take(3 * BLOCK) == large
    assert extents.take(2 * BLOCK) == large + 3 * BLOCK
    assert extents.take(1) == extents.end - BLOCK  # The file grows, because no extent is free.


def test_adjacent_free_extents_are_merged_and_free_extent_at_end_shortens_file():
    extents = ExtentAllocator(0)
    first, second, third, last = (extents.take(BLOCK) for _ in range(4))
    for offset in (first, third, second):
        extents.give_back(offset, BLOCK)
    assert extents.take(3 * BLOCK) == first
    extents.give_back(last, BLOCK)
    assert extents.end == 3 * BLOCK
    extents.give_back(first, 3 * BLOCK)
    assert extents.end == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40_000)), max_size=60))
def test_used_extents_never_overlap_and_can_be_restored(steps):
    extents, used = ExtentAllocator(BLOCK), {}
    for take, number in steps:
        if take or not used:
            offset = extents.take(number)
            end = offset + max(number, 1)
            assert offset >= BLOCK and end <= extents.end
            assert all(end <= other or offset >= other + max(length, 1) for other, length in used.items())
            used[offset] = number
        else:
            offset = sorted(used)[number % len(used)]
            extents.give_back(offset, used.pop(offset))
    restored = ExtentAllocator(BLOCK, sorted(used.items()))
    assert restored.end == extents.end
    assert restored._by_size == extents._by_size
