"""The rate limiter of all replay buffers. It decides when a batch may be sampled, and when an item may be inserted.

It follows Reverb's rate limiters (https://github.com/google-deepmind/reverb/blob/master/docs/rate_limiters.md).

The number of samples by which writers may be ahead of a reader in another process is given in rounds. A round is the
samples of one batch, or the samples that one item of every environment allows (`samples_per_insert` for each item). The
larger number counts.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rlframe.types import ReplaySpec, Sequence

_log = logging.getLogger(__name__)

ROUNDS_AHEAD = 2  # rounds that writers in another process may be ahead of the reader
# Factor of `lapse_after` for a writer that has not added a step, because it may still be compiling.
_STARTUP_FACTOR = 2


class ItemCounts(NamedTuple):
    """Numbers of items in a replay, for `RateLimiter`."""

    size: int  # items in the replay now
    inserted: int  # items inserted since the replay was created
    sampled: int  # items sampled since the replay was created


class RateLimiter:
    """Keeps samples in proportion to inserts.

    A batch may be sampled

    - from a queue, if the queue has a whole batch and at least `min_size` items;
    - from another replay, if `min_size` items were ever inserted and the replay has at least one item. (The limiter
      counts inserted items, because a full buffer may have fewer items than its capacity: no item begins at an
      episode's last timestep.)

    `samples_per_insert` adds a second condition, which limits how far the inserts are ahead:

        ahead = samples_per_insert * (inserted - min_size) - sampled

    A batch may be sampled while `ahead >= 0`, so the first batch is available when `min_size` items were inserted. An
    item may be inserted while `ahead <= samples_per_insert * run_ahead`, where `run_ahead` is a number of items.
    Between these bounds, neither writers nor readers wait.

    A batch has `batch_size` items. If `batch_size` is None, a batch has one item of each environment of the writers in
    the quorum (see `WriterQuorum`).

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
        """Return the size of the next batch. 0 while there are too few items, or while sampling is ahead.

        Args:
            counts: the replay's numbers of items.
            writers: returns the state of each rank's writer, including writers that have not started. Called only if
                `batch_size` is None.
            items: returns the number of items of each rank. Called only if a batch may exclude some writers.
        """
        count, size = self._batch_size, counts.size
        if count is None:
            there = writers()
            count = sum([writer.num_envs for writer in there.values()])
            if self._is_queue and size and (size < count or not all(writer.num_envs for writer in there.values())):
                count = self._quorum.complete_items(there, items()) if len(there) > 1 else 0
        return count if count and self.may_sample(count, counts) else 0

    def ahead(self, inserted: int, sampled: int) -> float:
        """Return the number of samples by which the inserts are ahead of the ratio. 0 if there is no ratio."""
        return 0.0 if self.ratio is None else self.ratio * (inserted - self._min_size) - sampled

    def may_sample(self, batch_size: int, counts: ItemCounts) -> bool:
        """Return True if a batch of `batch_size` items may be sampled."""
        size, inserted, sampled = counts
        if self._is_queue:
            enough = size >= max(self._min_size, batch_size)
        else:
            enough = inserted >= self._min_size and size > 0
        return enough and (self.ratio is None or self.ahead(inserted, sampled) >= 0)

    def may_insert(self, inserted: int, sampled: int, run_ahead: int) -> bool:
        """Return True if an item may be inserted. Inserts may be `run_ahead` items ahead."""
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
        """Return the bounds of Reverb's `SampleToInsertRatio` on `samples_per_insert * inserted - sampled`.

        Reverb checks the bounds before each item of a batch, not only before the first item.
        """
        assert self.ratio is not None
        zero = self.ratio * self._min_size
        least = zero - batch_size
        # Reverb requires an error buffer of max(1, ratio) on both sides. An insert adds `ratio` to the difference, and
        # a sample subtracts 1. So with closer bounds, inserts and samples might both be blocked.
        return least, max(zero + self.ratio * run_ahead, least + 2 * max(1.0, self.ratio))


class WriterState(NamedTuple):
    """The state of a writer, for `WriterQuorum`."""

    num_envs: int  # 0 before the writer starts
    progress: Any  # changes with each step, or with each item if steps are not visible; falsy before the first change
    is_alive: Callable[[], bool]  # returns False if the writer is known to have exited


class WriterQuorum:
    """Decides which writers a batch of one item per environment waits for.

    A batch needs one item of each environment of each writer. If a writer is dead or makes no progress, it lapses, and
    batches no longer wait for its items. When the writer makes progress again, batches wait for it again. Only one
    thread may call this object at a time.

    Args:
        lapse_after: seconds without progress after which a writer lapses if items of other writers are waiting.
        clock: returns the time in seconds.
    """

    def __init__(self, lapse_after: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lapse_after, self._clock = lapse_after, clock
        self._lapsed: set[int] = set()  # ranks of lapsed writers
        self._progress: dict[int, Any] = {}
        self._progress_changed_at: dict[int, float] = {}  # time of the last change of the progress
        self._items: Mapping[int, int] = {}
        self._items_changed_at = 0.0  # time of the last change of the items

    def complete_items(self, writers: Mapping[int, WriterState], items: Mapping[int, int]) -> int:
        """Return the total number of items of the writers that have all their items.

        Return 0 while the batch must wait for another writer.

        Args:
            writers: rank -> state of the rank's writer.
            items: rank -> number of items. Ranks without items may be missing.
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
        """Return the number of items in a batch of all writers that have not lapsed."""
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
    """Return the maximum number of items that begin in `capacity` steps."""
    stride = min(spec.item.length, spec.item.period) if isinstance(spec.item, Sequence) else 1
    return max(-(-spec.capacity // stride), spec.min_size)


def samples_of_rounds(spec: ReplaySpec, num_envs: int, rounds: int) -> float:
    """Return the number of samples in `rounds` rounds.

    Writers in another process may be this many samples ahead of `samples_per_insert`. So writers and readers do not
    wait for each other at each item, and few updates are left when the last item is inserted.
    """
    return rounds * max(spec.batch_size or num_envs, (spec.samples_per_insert or 0.0) * num_envs)


def items_of_rounds(spec: ReplaySpec, num_envs: int, rounds: int) -> int | None:
    """Return the number of items in `rounds` rounds. None if there is no ratio."""
    ratio = spec.samples_per_insert
    return None if ratio is None else math.ceil(samples_of_rounds(spec, num_envs, rounds) / ratio)


def default_run_ahead(spec: ReplaySpec) -> int:
    """Return the default `run_ahead`, in items. A loop in one process adds hundreds of items before it samples."""
    return max(spec.min_size, 2 * (spec.batch_size or 1), 256)
