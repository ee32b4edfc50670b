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


def form(
    batch_size: int, lanes: Lanes, shares: Sequence[MinimumShare], too_old: Callable[[QueuedGroup], bool]
) -> tuple[list[Taken] | None, list[Taken]]:
    """Take exactly `batch_size` sequences out of `lanes`, or leave them as they were but for what is too old.

    Returns:
        (the units of the batch, oldest first; None where none can be formed, units on the way that were too old).
    """
    dropped: list[Taken] = []
    shares = scaled(batch_size, shares)
    while fillable(batch_size, lanes.counts):
        known = len(dropped)
        attempt = _Attempt(batch_size, lanes, too_old, dropped)
        if attempt.minimums(shares) and attempt.rest():
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

    def minimums(self, shares: Sequence[MinimumShare]) -> bool:
        """Give each environment its share in whole units. False where the batch has to wait for one of them.

        A share is rounded up to whole units where an exact batch stays possible, else down. Possible is what the units
        that are here can fill together with as many more as the environments that have a share may send: waiting for
        those is what a share means. Nobody else is waited for.
        """
        unlimited = {share.unit_size: self._batch_size for share in shares}
        got = dict.fromkeys((share.env_id for share in shares), 0)
        for beyond in (False, True):  # whole units inside every share, then the unit that reaches over the edge
            for share in shares:
                while got[share.env_id] < share.sequences:
                    room = self._left if beyond else share.sequences - got[share.env_id]
                    coming = {**self._lanes.counts, **unlimited}
                    lanes = sorted(self._lanes.of_env(share.env_id), key=lambda lane: lane.head.id)
                    lane = next((lane for lane in lanes if self._fits(lane.size, room, coming)), None)
                    if lane is not None:
                        got[share.env_id] += self._take(lane)
                    elif not lanes and self._fits(share.unit_size, room, coming):
                        return False
                    else:
                        break
        return True

    def _fits(self, size: int, room: int, coming: dict[int, int]) -> bool:
        return size <= room and fillable(self._left - size, coming, spent=size)

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
