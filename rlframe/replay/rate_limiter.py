"""When a batch may be sampled, and when an item may be inserted: the one rule that every replay buffer follows.

It is the rule of Reverb's rate limiters (https://github.com/google-deepmind/reverb/blob/master/docs/rate_limiters.md).

How far writers may be ahead of a reader in another process is counted in rounds. A round is the samples of one batch,
or those that one item of every environment allows (`samples_per_insert` for each), whichever is more.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rlframe.types import ReplaySpec, Sequence

_log = logging.getLogger(__name__)

ROUNDS_AHEAD = 2  # rounds that writers in other processes than the reader's may be ahead of it
# a writer that has yet to take its first step is waited for so many times as long: it may still compile
_STARTUP_FACTOR = 2


class ItemCounts(NamedTuple):
    """How many items of a replay there are, for `RateLimiter`."""

    size: int  # there now
    inserted: int  # ever
    sampled: int  # ever


class RateLimiter:
    """Keeps samples in proportion to inserts.

    A batch may be sampled

    - from a queue, once it holds a whole batch and at least `min_size` items;
    - from another replay, once `min_size` items were ever inserted and some item is there. (A full buffer may hold
      fewer than its capacity: an episode's last timestep begins no item. So it is not the items that are there.)

    With `samples_per_insert` there is a second condition, on how far the inserts are ahead:

        ahead = samples_per_insert * (inserted - min_size) - sampled

    A batch may be sampled while `ahead >= 0`, so the first comes with item number `min_size`; an item may be inserted
    while `ahead <= samples_per_insert * run_ahead`, where `run_ahead` is in items. Between these bounds nobody waits.

    A batch is of `batch_size` items. Where that is None, it is of one item of each environment of the writers that are
    worth waiting for: see `WriterQuorum`.

    Args:
        spec: what the agent learns from.
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
        """Return how many items a batch would have now; 0 while there is too little, or sampling is ahead.

        Args:
            counts: of the replay.
            writers: of each rank, those that are yet to come too; asked where `batch_size` is None.
            items: how many items of each rank there are; asked where a batch may have to do without some writers.
        """
        count, size = self._batch_size, counts.size
        if count is None:
            there = writers()
            count = sum([writer.num_envs for writer in there.values()])
            if self._is_queue and size and (size < count or not all(writer.num_envs for writer in there.values())):
                count = self._quorum.complete_items(there, items()) if len(there) > 1 else 0
        return count if count and self.may_sample(count, counts) else 0

    def ahead(self, inserted: int, sampled: int) -> float:
        """Return the samples by which the inserts are ahead of the ratio; 0 if there is no ratio."""
        return 0.0 if self.ratio is None else self.ratio * (inserted - self._min_size) - sampled

    def may_sample(self, batch_size: int, counts: ItemCounts) -> bool:
        """Return whether a batch of `batch_size` may be sampled."""
        size, inserted, sampled = counts
        if self._is_queue:
            enough = size >= max(self._min_size, batch_size)
        else:
            enough = inserted >= self._min_size and size > 0
        return enough and (self.ratio is None or self.ahead(inserted, sampled) >= 0)

    def may_insert(self, inserted: int, sampled: int, run_ahead: int) -> bool:
        """Return whether an item may be inserted, where inserts may be ahead by `run_ahead` items."""
        return self.ratio is None or self.ahead(inserted, sampled) <= self.ratio * run_ahead

    def inserts_needed(self, counts: ItemCounts, writers: Callable[[], Mapping[int, WriterState]]) -> int:
        """Return how many items must have been inserted, in all, before `items_to_sample` is above 0."""
        size, inserted, sampled = counts
        if self._is_queue:
            count = self._batch_size or self._quorum.expected(writers())
            return inserted + max(1, max(self._min_size, count) - size)
        needed = max(self._min_size, 1 if size else inserted + 1)
        return max(needed, self._min_size + math.ceil(sampled / self.ratio)) if self.ratio else needed

    def reverb_bounds(self, batch_size: int, run_ahead: int) -> tuple[float, float]:
        """Return the bounds of Reverb's `SampleToInsertRatio` on `samples_per_insert * inserted - sampled`.

        Reverb asks before each item of a batch, and not before the first alone.
        """
        assert self.ratio is not None
        zero = self.ratio * self._min_size
        least = zero - batch_size
        # Reverb's rule, an error buffer of max(1, ratio) to either side: an insert adds `ratio` to the difference and a
        # sample takes 1 from it, so between narrower bounds neither might be allowed.
        return least, max(zero + self.ratio * run_ahead, least + 2 * max(1.0, self.ratio))


class WriterState(NamedTuple):
    """State of a writer, for `WriterQuorum`."""

    num_envs: int  # 0 before it came
    progress: Any  # differs after each step that it took (where only items are seen: after each of these); 0 before
    is_alive: Callable[[], bool]  # False where it is known to have ended


class WriterQuorum:
    """Decides which writers a batch of one item per environment waits for.

    Each writer owes an item of each of its environments. One that is dead, or stands still, lapses, so that it does not
    hold up the others; it counts again as soon as it moves. One thread at a time.

    Args:
        lapse_after: seconds without a step of a writer, while others' items wait, after which it lapses.
        clock: gives the time in seconds.
    """

    def __init__(self, lapse_after: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lapse_after, self._clock = lapse_after, clock
        self._lapsed: set[int] = set()  # ranks
        self._progress: dict[int, Any] = {}
        self._progress_changed_at: dict[int, float] = {}  # when the progress was seen to change
        self._items: Mapping[int, int] = {}
        self._items_changed_at = 0.0  # when the items were seen to change

    def complete_items(self, writers: Mapping[int, WriterState], items: Mapping[int, int]) -> int:
        """Return how many items the writers whose items are all there have; 0 while another writer is waited for.

        Args:
            writers: of each rank.
            items: how many items of each rank there are; ranks without any may be left out.
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
            self._items_changed_at = now  # nobody waits yet
            return 0
        waited_for = [rank for rank in missing if not self._check_lapse(rank, writers[rank], now)]
        return 0 if waited_for else whole

    def expected(self, writers: Mapping[int, WriterState]) -> int:
        """Return the number of items of a batch from all writers that have not lapsed."""
        return sum(writer.num_envs for rank, writer in writers.items() if rank not in self._lapsed)

    def _check_lapse(self, rank: int, writer: WriterState, now: float) -> bool:
        limit = self._lapse_after * (1 if writer.progress else _STARTUP_FACTOR)
        waited = now - max(self._items_changed_at, self._progress_changed_at[rank])
        if writer.is_alive():
            if waited <= limit:
                return False
            _log.warning("Writer %d has stood still for %.0f s: batches are made without it.", rank, waited)
        self._lapsed.add(rank)
        return True


def items_kept(spec: ReplaySpec) -> int:
    """Return how many items `capacity` steps begin, at most."""
    stride = min(spec.item.length, spec.item.period) if isinstance(spec.item, Sequence) else 1
    return max(-(-spec.capacity // stride), spec.min_size)


def samples_of_rounds(spec: ReplaySpec, num_envs: int, rounds: int) -> float:
    """Return the samples of so many rounds.

    Writers in other processes may be that far ahead of `samples_per_insert`, so that neither side waits for the other
    at each item, and hardly an update is left to do when the last item was inserted.
    """
    return rounds * max(spec.batch_size or num_envs, (spec.samples_per_insert or 0.0) * num_envs)


def items_of_rounds(spec: ReplaySpec, num_envs: int, rounds: int) -> int | None:
    """Return the items of so many rounds; None if inserts have no ratio to be ahead of."""
    ratio = spec.samples_per_insert
    return None if ratio is None else math.ceil(samples_of_rounds(spec, num_envs, rounds) / ratio)


def default_run_ahead(spec: ReplaySpec) -> int:
    """Return the default `run_ahead` in items: a loop in one process adds hundreds before it samples."""
    return max(spec.min_size, 2 * (spec.batch_size or 1), 256)
