"""Exact filling: which sizes sum to a target, when there are only so many of each.

A set of reachable sums is one Python int, bit `t` set where `t` can be reached, so taking up to `n` units of a size in
is about log2(n) shifts. The work depends on the number of distinct sizes and on the target, never on how many units
wait: more units of a size than fit into the target count as many as fit. Answers are cached by those counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

_Counts = tuple[tuple[int, int], ...]


def fillable(target: int, counts: Mapping[int, int], spent: int | None = None) -> bool:
    """Whether units sum to `target` exactly.

    Args:
        target: the sum wanted; 0 is filled by nothing.
        counts: how many units there are of each size.
        spent: a size of which one unit counts as gone already.
    """
    if target <= 0:
        return target == 0
    capped = _capped(target, counts, spent)
    if sum(size * count for size, count in capped) < target:
        return False
    unit = math.gcd(*(size for size, _ in capped))
    if target % unit:
        return False
    smallest, count = capped[0]
    if smallest == unit and (count + 1) * unit >= capped[-1][0]:
        return True  # the smallest close every gap that the others leave: so it is with one size, or with powers of two
    return _fillable(target // unit, tuple((size // unit, count) for size, count in capped))


def usable(target: int, counts: Mapping[int, int]) -> frozenset[int]:
    """The sizes that take part in at least one exact filling of `target`."""
    return _usable(target, _capped(target, counts, None))


def oldest_fitting(target: int, counts: Mapping[int, int], age: Callable[[int], int]) -> int | None:
    """The size to take next: of those that leave what can still be filled, that with the smallest `age`; or None."""
    for size in sorted((size for size, count in counts.items() if count and size <= target), key=age):
        if fillable(target - size, counts, spent=size):
            return size
    return None


def _capped(target: int, counts: Mapping[int, int], spent: int | None) -> _Counts:
    capped = []
    for size, count in counts.items():
        if size == spent:
            count -= 1
        if count > 0 and size <= target:
            capped.append((size, min(count, target // size)))
    capped.sort()
    return tuple(capped)


@lru_cache(maxsize=16_384)
def _fillable(target: int, counts: _Counts) -> bool:
    mask = (2 << target) - 1
    sums = 1
    for size, count in counts:
        sums = _spread(sums, size, count, mask)
    return bool(sums >> target & 1)


@lru_cache(maxsize=1024)
def _usable(target: int, counts: _Counts) -> frozenset[int]:
    if sum(size * count for size, count in counts) < target:  # a short queue must not cost what a long batch does
        return frozenset()
    mask = (2 << target) - 1
    below = [1]  # below[i]: the sums that the first i sizes reach
    for size, count in counts:
        below.append(_spread(below[-1], size, count, mask))
    found = set()
    above = 1  # the sums that the sizes after this one reach
    for i in reversed(range(len(counts))):
        size, count = counts[i]
        with_one = _spread(above, size, count - 1, mask) << size & mask
        if below[i] & _mirrored(with_one, target):
            found.add(size)
        above |= with_one
    return frozenset(found)


def _spread(sums: int, size: int, count: int, mask: int) -> int:
    """The sums reached from `sums` with 0 to `count` more units of `size`."""
    chunk = 1
    while count > 0:
        step = min(chunk, count)
        sums |= sums << step * size & mask
        count -= step
        chunk *= 2
    return sums


def _mirrored(sums: int, target: int) -> int:
    """Bit t of the answer is bit `target - t` of `sums`."""
    return int(f"{sums:0{target + 1}b}"[::-1], 2)
