"""One batch out of the lanes: minimum shares first, the rest oldest first, exactly full or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rlframe.trajectories.queue.lanes import Lane, Lanes, QueuedGroup
from rlframe.trajectories.queue.packing import fillable, oldest_fitting


class MinimumShare(NamedTuple):
    """The sequences of each batch that belong to one live environment."""

    env_id: int
    unit_size: int  # what it sends, as far as is known
    sequences: int


class Taken(NamedTuple):
    env_id: int | None
    size: int
    unit: QueuedGroup


def scaled(batch_size: int, shares: Sequence[MinimumShare]) -> list[MinimumShare]:
    """The same shares, in proportion where together they are more than a batch."""
    total = sum(share.sequences for share in shares)
    if total <= batch_size:
        return list(shares)
    return [share._replace(sequences=share.sequences * batch_size // total) for share in shares]


def awaited(batch_size: int, lanes: Lanes, shares: Sequence[MinimumShare]) -> list[MinimumShare]:
    """The shares that a batch waits for: of environments that have nothing in the queue which fits into one.

    An environment of which nothing would ever fit is not waited for, nor is the rest of a share of which there is some:
    others fill it. So does the published server.
    """
    missing = []
    for share in shares:
        sizes = {lane.size for lane in lanes.of_env(share.env_id)}
        if share.sequences and not any(fillable(batch_size - size, lanes.counts, spent=size) for size in sizes):
            missing.append((share, {*sizes, share.unit_size}))
    coming = {**lanes.counts, **dict.fromkeys((size for _, sizes in missing for size in sizes), batch_size)}
    return [share for share, sizes in missing if any(fillable(batch_size - size, coming, spent=size) for size in sizes)]


def form(
    batch_size: int, lanes: Lanes, shares: Sequence[MinimumShare], too_old: Callable[[QueuedGroup], bool]
) -> tuple[list[Taken] | None, list[Taken]]:
    """Take exactly `batch_size` sequences out of `lanes`, or leave them as they were but for what is too old.

    Returns:
        (the units of the batch, oldest first; None where none can be formed, units on the way that were too old).
    """
    dropped: list[Taken] = []
    shares = scaled(batch_size, shares)
    while fillable(batch_size, lanes.counts) and not awaited(batch_size, lanes, shares):
        known = len(dropped)
        attempt = _Attempt(batch_size, lanes, too_old, dropped)
        attempt.minimums(shares)
        if attempt.rest() and len(dropped) == known:  # else a share may be empty now
            return sorted(attempt.taken, key=lambda taken: taken.unit.id), dropped
        for taken in reversed(attempt.taken):
            lanes.push(*taken, again=True)
        if len(dropped) == known:
            break
    return None, dropped


class _Attempt:
    def __init__(
        self, batch_size: int, lanes: Lanes, too_old: Callable[[QueuedGroup], bool], dropped: list[Taken]
    ) -> None:
        self.taken: list[Taken] = []
        self._lanes = lanes
        self._too_old = too_old
        self._dropped = dropped
        self._batch_size = self._left = batch_size

    def rest(self) -> bool:
        """Fill what is left, oldest first. False where that is impossible."""
        while self._left:
            size = oldest_fitting(self._left, self._lanes.counts, lambda size: self._lanes.oldest(size).head.id)
            if size is None:
                return False
            self._take(self._lanes.oldest(size))
        return True

    def minimums(self, shares: Sequence[MinimumShare]) -> None:
        """Give each environment its share in whole units, as far as there are any.

        A share is rounded up to whole units where an exact batch stays possible, else down.
        """
        got = dict.fromkeys((share.env_id for share in shares), 0)
        for beyond in (False, True):  # whole units inside every share, then the unit that reaches over the edge
            for share in shares:
                while got[share.env_id] < share.sequences:
                    room = self._left if beyond else share.sequences - got[share.env_id]
                    lanes = sorted(self._lanes.of_env(share.env_id), key=lambda lane: lane.head.id)
                    lane = next((lane for lane in lanes if lane.size <= room and self._fits(lane.size)), None)
                    if lane is None:
                        break
                    got[share.env_id] += self._take(lane)

    def _fits(self, size: int) -> bool:
        return fillable(self._left - size, self._lanes.counts, spent=size)

    def _take(self, lane: Lane) -> int:
        """Take the oldest unit of a lane that is not too old. Returns its sequences, 0 where there is none."""
        while lane.units:
            taken = Taken(lane.env_id, lane.size, self._lanes.pop(lane))
            if self._too_old(taken.unit):
                self._dropped.append(taken)
                continue
            self.taken.append(taken)
            self._left -= lane.size
            return lane.size
        return 0
