"""Where in a file there is room: best fit, and neighbours that are free become one."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

BLOCK = 4096  # bytes: what a file system writes at least


class Extents:
    """The free parts of a file between `start` and `end`, `free` bytes together. Nothing is free behind `end`: the file
    may grow there.

    Args:
        start: the first byte that may be used, a multiple of `BLOCK`.
        used: offset and length, in bytes, of what is in use, ascending; parts do not overlap.
    """

    def __init__(self, start: int, used: Iterable[tuple[int, int]] = ()) -> None:
        self.end = start
        self.free = 0
        self._size_at: dict[int, int] = {}  # of the free part that begins there
        self._start_of: dict[int, int] = {}  # of the free part that ends there
        self._by_size: list[tuple[int, int]] = []  # (size, start), sorted
        for offset, length in used:
            if offset > self.end:
                self._insert(self.end, offset - self.end)
            self.end = offset + _blocks(length)

    def take(self, length: int) -> int:
        """The offset of room for `length` bytes: the smallest free part that suffices, or the end of the file."""
        size = _blocks(length)
        index = bisect.bisect_left(self._by_size, (size, 0))
        if index == len(self._by_size):
            self.end += size
            return self.end - size
        found, offset = self._by_size[index]
        self._remove(offset)
        if found > size:
            self._insert(offset + size, found - size)
        return offset

    def give_back(self, offset: int, length: int) -> None:
        """Make what `take` gave free again."""
        size = _blocks(length)
        if offset in self._start_of:
            before = self._start_of[offset]
            size += self._remove(before)
            offset = before
        if offset + size in self._size_at:
            size += self._remove(offset + size)
        if offset + size == self.end:
            self.end = offset
        else:
            self._insert(offset, size)

    def _insert(self, offset: int, size: int) -> None:
        self.free += size
        self._size_at[offset] = size
        self._start_of[offset + size] = offset
        bisect.insort(self._by_size, (size, offset))

    def _remove(self, offset: int) -> int:
        size = self._size_at.pop(offset)
        self.free -= size
        del self._start_of[offset + size]
        del self._by_size[bisect.bisect_left(self._by_size, (size, offset))]
        return size


def _blocks(length: int) -> int:
    return max(1, -(-length // BLOCK)) * BLOCK
