"""Counts per second, of the last seconds."""

from __future__ import annotations

import collections

_SPAN = 5.0  # seconds that rates are of


class Rates:
    """How fast some counts rise.

    Args:
        size: how many counts.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._points: collections.deque[tuple[float, tuple[float, ...]]] = collections.deque()

    def add(self, now: float, *counts: float) -> None:
        """Takes the counts as they are now."""
        self._points.append((now, counts))
        while self._points[0][0] < now - _SPAN:
            self._points.popleft()

    def per_second(self, now: float) -> tuple[float, ...]:
        """Of each count; 0 where nothing was counted lately."""
        recent = [point for point in self._points if point[0] >= now - _SPAN]
        if not recent or recent[0][0] >= now:
            return (0.0,) * self._size
        began, first = recent[0]
        return tuple((last - before) / (now - began) for before, last in zip(first, recent[-1][1]))
