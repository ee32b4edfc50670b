"""The rate limiter of all replay buffers. It decides when a batch can be sampled, and when an item can be inserted.

It follows Reverb's rate limiters (https://github.com/google-deepmind/reverb/blob/master/docs/rate_limiters.md).

Writers can be ahead of a reader in another process by a limited number of samples. The unit of this limit is a round:
the size of a batch, or `samples_per_insert` times the number of environments. The larger of these numbers is used.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rlframe.types import ReplaySpec, Sequence

_log = logging.getLogger(__name__)

ROUNDS_AHEAD = 2  # limit of how far writers can be ahead of a reader in another process, in rounds
# Multiply `lapse_after` by this factor until a writer has added its first step, because the writer can be compiling.
_STARTUP_FACTOR = 2


class ItemCounts(NamedTuple):
    """The counts of items that the `RateLimiter` of a replay needs."""

    size: int  # items in the replay now
    inserted: int  # items inserted since the replay was created
    sampled: int  # items sampled since the replay was created


class RateLimiter:
    """Keeps the ratio of samples to inserts constant.

    A batch can be sampled

    - from a queue, if the queue has a whole batch and at least `min_size` items;
    - from another replay, if at least `min_size` items were inserted so far, and the replay has at least one item.
      (The limiter counts inserted items, because a full buffer can have fewer items than its capacity: no item begins
      at the last timestep of an episode.)

    `samples_per_insert` adds a second condition, which limits how far the inserts are ahead:

        ahead = samples_per_insert * (inserted - min_size) - sampled

    A batch can be sampled while `ahead >= 0`, so the first batch is available when `min_size` items were inserted. An
    item can be inserted while `ahead <= samples_per_insert * run_ahead`, where `run_ahead` is a number of items.
    Between these bounds, neither writers nor readers wait.

    A batch has `batch_size` items. If `batch_size` is None, a batch has one item of each environment of the writers in
    the quorum (see `WriterQuorum`). With a `max_staleness` above 0, a fast writer can queue several items of each
    environment before a slow writer queues its first. Such a batch has the same size, but takes the oldest items.

    Args:
        spec: the agent's `replay_spec`.
    """

    def __init__(self, spec: ReplaySpec) -> None:
        self._is_queue, self._min_size, self.ratio = spec.kind == "queue", spec.min_size, spec.samples_per_insert
        self._batch_size, self._quorum = spec.batch_size, WriterQuorum(spec.lapse_after)

    def items_to_sample(
        self,
        counts: ItemCounts,
        writers: Callable[[], Mapping[int, WriterState]],
        items: Callable[[], Mapping[int, int]],
    ) -> int:
        """Return the size of the next batch, or 0 if there are too few items, or if sampling is ahead.

        Args:
            counts: the replay's counts of items.
            writers: function that returns the state of each rank's writer, including writers that have not started. It
                is called only if there are items, and if `batch_size` is None.
            items: function that returns the number of items of each rank. It is called only if not all writers have
                items for a batch.
        """
        count, size = self._batch_size, counts.size
        if not size:
            return 0
        if count is None:
            there = writers()
            count = sum([writer.num_envs for writer in there.values()])
            if self._is_queue and (size < count or not all(writer.num_envs for writer in there.values())):
                count = self._quorum.complete_items(there, items()) if len(there) > 1 else 0
        return count if count and self.may_sample(count, counts) else 0

    def ahead(self, inserted: int, sampled: int) -> float:
        """Return by how many samples the inserts are ahead of the ratio, or 0 if there is no ratio."""
        return 0.0 if self.ratio is None else self.ratio * (inserted - self._min_size) - sampled

    def may_sample(self, batch_size: int, counts: ItemCounts) -> bool:
        """Return True if a batch of `batch_size` items can be sampled now."""
        size, inserted, sampled = counts
        if self._is_queue:
            enough = size >= max(self._min_size, batch_size)
        else:
            enough = inserted >= self._min_size and size > 0
        return enough and self.ahead(inserted, sampled) >= 0

    def may_insert(self, inserted: int, sampled: int, run_ahead: int) -> bool:
        """Return True if an item can be inserted now. The inserts can be up to `run_ahead` items ahead."""
        return self.ratio is None or self.ahead(inserted, sampled) <= self.ratio * run_ahead

    def inserts_needed(self, counts: ItemCounts, writers: Callable[[], Mapping[int, WriterState]]) -> int:
        """Return the total number of inserts after which `items_to_sample` is above 0."""
        size, inserted, sampled = counts
        if self._is_queue:
            count = self._batch_size or self._quorum.expected(writers())
            return inserted + max(1, max(self._min_size, count) - size)
        needed = max(self._min_size, 1 if size else inserted + 1)
        return max(needed, self._min_size + math.ceil(sampled / self.ratio)) if self.ratio else needed

    def reverb_bounds(self, batch_size: int, run_ahead: int) -> tuple[float, float]:
        """Return (minimum, maximum) of `samples_per_insert * inserted - sampled`, for Reverb's `SampleToInsertRatio`.

        Reverb checks these bounds before each item of a batch, not only before the first item.
        """
        assert self.ratio is not None
        zero = self.ratio * self._min_size
        least = zero - batch_size
        # Reverb requires a distance of 2 * max(1, ratio) between the bounds. An insert adds `ratio` to the difference,
        # and a sample subtracts 1. So with a smaller distance, Reverb could block inserts and samples forever.
        return least, max(zero + self.ratio * run_ahead, least + 2 * max(1.0, self.ratio))


class WriterState(NamedTuple):
    """The state of a writer that `WriterQuorum` reads."""

    num_envs: int  # 0 before the writer starts
    progress: Any  # any value that changes with each step (or each item); falsy before the first step
    is_alive: Callable[[], bool]  # returns False if the writer has certainly exited


class WriterQuorum:
    """Decides which writers must contribute to a batch that has one item per environment.

    A batch waits until each writer has one item of each of its environments. If a writer is dead or makes no progress,
    it lapses: batches no longer wait for its items. When the writer makes progress again, batches wait for it again.
    Only one thread at a time can call this object.

    Args:
        lapse_after: seconds without progress after which a writer lapses, if items of other writers are waiting.
        clock: function that returns the time in seconds.
    """

    def __init__(self, lapse_after: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lapse_after, self._clock = lapse_after, clock
        self._lapsed: set[int] = set()  # ranks of lapsed writers
        self._progress: dict[int, Any] = {}
        self._progress_changed_at: dict[int, float] = {}  # rank -> time of the last progress
        self._items: Mapping[int, int] = {}
        self._items_changed_at = 0.0  # time at which `_items` changed

    def complete_items(self, writers: Mapping[int, WriterState], items: Mapping[int, int]) -> int:
        """Return the number of items in the next batch, or 0 if the batch must wait for a writer.

        Args:
            writers: rank -> state of the rank's writer.
            items: rank -> number of items. Ranks without items can be missing.
        """
        now = self._clock()
        if items != self._items:
            self._items, self._items_changed_at = dict(items), now
        whole, missing = 0, []
        for rank, writer in writers.items():
            if self._progress.get(rank) != writer.progress:
                self._progress[rank], self._progress_changed_at[rank] = writer.progress, now
                self._lapsed.discard(rank)
            self._progress_changed_at.setdefault(rank, now)
            if 0 < writer.num_envs <= items.get(rank, 0):
                whole += writer.num_envs
            elif rank not in self._lapsed:
                missing.append(rank)
        if not whole:
            self._items_changed_at = now  # no items are waiting
            return 0
        waited_for = [rank for rank in missing if not self._check_lapse(rank, writers[rank], now)]
        return 0 if waited_for else whole

    def expected(self, writers: Mapping[int, WriterState]) -> int:
        """Return the number of items in a batch from all writers that have not lapsed."""
        return sum(writer.num_envs for rank, writer in writers.items() if rank not in self._lapsed)

    def _check_lapse(self, rank: int, writer: WriterState, now: float) -> bool:
        limit = self._lapse_after * (1 if writer.progress else _STARTUP_FACTOR)
        waited = now - max(self._items_changed_at, self._progress_changed_at[rank])
        if writer.is_alive():
            if waited <= limit:
                return False
            _log.warning("Writer %d has made no progress for %.0f s. Batches no longer wait for it.", rank, waited)
        self._lapsed.add(rank)
        return True


def items_kept(spec: ReplaySpec) -> int:
    """Return the maximum number of items in a replay: the items that begin within `capacity` steps."""
    stride = min(spec.item.length, spec.item.period) if isinstance(spec.item, Sequence) else 1
    return max(-(-spec.capacity // stride), spec.min_size)


def samples_of_rounds(spec: ReplaySpec, num_envs: int, rounds: int) -> float:
    """Return the number of samples in `rounds` rounds. (The docstring of this file defines a round.)

    Writers in another process can be ahead of `samples_per_insert` by this number. It is large, so that writers and
    readers rarely wait for each other, and small, so that few updates are left when the last item is inserted.
    """
    return rounds * max(spec.batch_size or num_envs, (spec.samples_per_insert or 0.0) * num_envs)


def items_of_rounds(spec: ReplaySpec, num_envs: int, rounds: int) -> int | None:
    """Return the number of items in `rounds` rounds, or None if there is no `samples_per_insert`."""
    ratio = spec.samples_per_insert
    return None if ratio is None else math.ceil(samples_of_rounds(spec, num_envs, rounds) / ratio)


def default_run_ahead(spec: ReplaySpec) -> int:
    """Return the default `run_ahead` in items. A loop in one process can add hundreds of items before it samples."""
    return max(spec.min_size, 2 * (spec.batch_size or 1), 256)
