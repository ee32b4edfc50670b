"""Which writers a batch of one item per environment waits for.

Each writer's share is an item of each of its environments. That of a writer that is dead, or stands still, lapses, so
that it does not hold up the others; it counts again as soon as that writer moves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_log = logging.getLogger(__name__)

_START = 2  # a writer that has yet to take its first step is waited for so many times as long: it may still compile


class WriterState(NamedTuple):
    """What is known of a writer."""

    num_envs: int  # 0 before it came
    progress: Any  # differs after each step that it took (where only items are seen: after each of these); 0 before
    is_alive: Callable[[], bool]  # False where it is known to have ended


class Shares:
    """Decides when a batch is due. One thread at a time.

    Args:
        lapse_after: seconds without a step of a writer, while others' items wait, after which its share lapses.
    """

    def __init__(self, lapse_after: float) -> None:
        self._lapse_after = lapse_after
        self._lapsed: set[int] = set()  # ranks
        self._progress: dict[int, Any] = {}
        self._moved: dict[int, float] = {}  # when the progress was seen to change
        self._items: Mapping[int, int] = {}
        self._came = 0.0  # when the items were seen to change

    def due(self, writers: Mapping[int, WriterState], items: Mapping[int, int]) -> int:
        """How many items to draw: 0 while some writer's share is waited for, or no share is there.

        Args:
            writers: of each rank.
            items: how many items of each rank there are; ranks without any may be left out.
        """
        now = time.monotonic()
        if items != self._items:
            self._items, self._came = dict(items), now
        whole, missing = 0, []
        for rank, writer in writers.items():
            if self._progress.get(rank) != writer.progress:
                self._progress[rank], self._moved[rank] = writer.progress, now
                self._lapsed.discard(rank)
            self._moved.setdefault(rank, now)
            if 0 < writer.num_envs <= items.get(rank, 0):
                whole += writer.num_envs
            elif rank not in self._lapsed:
                missing.append(rank)
        if not whole:
            self._came = now  # nobody waits yet
            return 0
        waited_for = [rank for rank in missing if not self._lapses(rank, writers[rank], now)]
        return 0 if waited_for else whole

    def expected(self, writers: Mapping[int, WriterState]) -> int:
        """Items of a batch of all whose shares have not lapsed."""
        return sum(writer.num_envs for rank, writer in writers.items() if rank not in self._lapsed)

    def _lapses(self, rank: int, writer: WriterState, now: float) -> bool:
        limit = self._lapse_after * (1 if writer.progress else _START)
        waited = now - max(self._came, self._moved[rank])
        if writer.is_alive():
            if waited <= limit:
                return False
            _log.warning("Writer %d has stood still for %.0f s: batches are made without it.", rank, waited)
        self._lapsed.add(rank)
        return True
