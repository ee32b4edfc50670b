"""One batch out of the lanes: minimum shares first, the rest oldest first or by weight; exactly full, or none."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rlframe.trajectories.queue.unit_queues import QueuedGroup, UnitQueue, UnitQueues, can_fill, oldest_fitting_size


class MinimumShare(NamedTuple):
    """The sequences of each batch that belong to one live environment."""

    env_id: int
    unit_size: int  # what it sends, as far as is known
    sequences: int


class TakenUnit(NamedTuple):
    env_id: int | None
    size: int
    unit: QueuedGroup


def scaled(batch_size: int, shares: Sequence[MinimumShare]) -> list[MinimumShare]:
    """The same shares, in proportion where together they are more than a batch."""
    total = sum(share.sequences for share in shares)
    if total <= batch_size:
        return list(shares)
    return [share._replace(sequences=share.sequences * batch_size // total) for share in shares]


def awaited(batch_size: int, lanes: UnitQueues, shares: Sequence[MinimumShare]) -> list[MinimumShare]:
    """The shares that a batch waits for: of environments that have nothing in the queue which fits into one.

    An environment of which nothing would ever fit is not waited for, nor is the rest of a share of which there is some:
    others fill it. So does the published server.
    """
    missing = []
    for share in shares:
        sizes = {lane.size for lane in lanes.of_env(share.env_id)}
        if share.sequences and not any(can_fill(batch_size - size, lanes.counts, spent=size) for size in sizes):
            missing.append((share, {*sizes, share.unit_size}))
    coming = {**lanes.counts, **dict.fromkeys((size for _, sizes in missing for size in sizes), batch_size)}
    return [share for share, sizes in missing if any(can_fill(batch_size - size, coming, spent=size) for size in sizes)]


def form(
    batch_size: int,
    lanes: UnitQueues,
    shares: Sequence[MinimumShare],
    too_old: Callable[[QueuedGroup], bool],
    weights: StartTimeFairQueue | None = None,
) -> tuple[list[TakenUnit] | None, list[TakenUnit]]:
    """Take exactly `batch_size` sequences out of `lanes`, or leave them as they were but for what is too old.

    Args:
        weights: by which what is beyond the minimum shares is divided; None: the oldest goes first.

    Returns:
        (the units of the batch, oldest first; None where none can be formed, units on the way that were too old).
    """
    dropped: list[TakenUnit] = []
    shares = scaled(batch_size, shares)
    while can_fill(batch_size, lanes.counts) and not awaited(batch_size, lanes, shares):
        known = len(dropped)
        attempt = _BatchBuilder(batch_size, lanes, too_old, dropped, weights and weights.copy())
        attempt.minimums(shares)
        filled = attempt.rest() if attempt.weights is None else attempt.rest_by_weight(attempt.weights)
        if filled and len(dropped) == known:  # else a share may be empty now
            if weights is not None and attempt.weights is not None:
                attempt.weights.end_batch({lane.env_id for lane in lanes})
                weights.set_state(attempt.weights.to_state())
            return sorted(attempt.taken, key=lambda taken: taken.unit.id), dropped
        for taken in reversed(attempt.taken):
            lanes.push(*taken, again=True)
        if len(dropped) == known:
            break
    return None, dropped


class _BatchBuilder:
    def __init__(
        self,
        batch_size: int,
        lanes: UnitQueues,
        too_old: Callable[[QueuedGroup], bool],
        dropped: list[TakenUnit],
        weights: StartTimeFairQueue | None,
    ) -> None:
        self.taken: list[TakenUnit] = []
        self.weights = weights
        self._lanes = lanes
        self._too_old = too_old
        self._dropped = dropped
        self._batch_size = self._left = batch_size

    def rest(self) -> bool:
        """Fill what is left, oldest first. False where that is impossible."""
        while self._left:
            size = oldest_fitting_size(self._left, self._lanes.counts, lambda size: self._lanes.oldest(size).head.id)
            if size is None:
                return False
            self._take(self._lanes.oldest(size))
        return True

    def rest_by_weight(self, weights: StartTimeFairQueue) -> bool:
        """Fill what is left, whose turn it is first. False where that is impossible."""
        turns = [
            (weights.turn(env_id), env_id is None, env_id or 0) for env_id in {lane.env_id for lane in self._lanes}
        ]
        heapq.heapify(turns)
        passed = []  # who has nothing that fits now
        while self._left and turns:
            _, anonymous, number = turn = heapq.heappop(turns)
            env_id = None if anonymous else number
            lane = self._oldest_fitting(env_id, self._left)
            if lane is None:
                passed.append(turn)
                continue
            self._take(lane)
            heapq.heappush(turns, (weights.turn(env_id), anonymous, number))
            for other in passed:
                heapq.heappush(turns, other)
            passed = []
        return not self._left

    def minimums(self, shares: Sequence[MinimumShare]) -> None:
        """Give each environment its share in whole units, as far as there are any.

        A share is rounded up to whole units where an exact batch stays possible, else down.
        """
        got = dict.fromkeys((share.env_id for share in shares), 0)
        for beyond in (False, True):  # whole units inside every share, then the unit that reaches over the edge
            for share in shares:
                while got[share.env_id] < share.sequences:
                    room = self._left if beyond else share.sequences - got[share.env_id]
                    lane = self._oldest_fitting(share.env_id, room)
                    if lane is None:
                        break
                    got[share.env_id] += self._take(lane)

    def _oldest_fitting(self, env_id: int | None, room: int) -> UnitQueue | None:
        """The lane with the oldest unit of an environment, at most so large, after which the batch can be filled."""
        lanes = sorted(self._lanes.of_env(env_id), key=lambda lane: lane.head.id)
        counts = self._lanes.counts
        fits = (lane for lane in lanes if lane.size <= room and can_fill(self._left - lane.size, counts, lane.size))
        return next(fits, None)

    def _take(self, lane: UnitQueue) -> int:
        """Take the oldest unit of a lane that is not too old. Returns its sequences, 0 where there is none."""
        while lane.units:
            taken = TakenUnit(lane.env_id, lane.size, self._lanes.pop(lane))
            if self._too_old(taken.unit):
                self._dropped.append(taken)
                continue
            self.taken.append(taken)
            self._left -= lane.size
            if self.weights is not None:
                self.weights.serve(lane.env_id, lane.size)
            return lane.size
        return 0


class StartTimeFairQueue:
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996): those who have something queued are served in proportion
    to their weights. Who has nothing takes no part, and has no claim to it later.

    Time is virtual here: sequences served, divided by the weight of whom they came from.

    Args:
        weight_of: of an environment, more than 0; its id is None where senders did not say who they are.
    """

    def __init__(self, weight_of: Callable[[int | None], float]) -> None:
        self._weight_of = weight_of
        self._now = 0.0
        self._served_until: dict[int | None, float] = {}

    def copy(self) -> StartTimeFairQueue:
        """The same, which goes on by itself."""
        copied = StartTimeFairQueue(self._weight_of)
        copied.set_state(self.to_state())
        return copied

    def turn(self, env_id: int | None) -> float:
        """When it is an environment's turn: the lowest is next."""
        return max(self._now, self._served_until.get(env_id, 0.0))

    def serve(self, env_id: int | None, sequences: int) -> None:
        """Count what is served."""
        self._served_until[env_id] = self.turn(env_id) + sequences / self._weight_of(env_id)

    def end_batch(self, queued: Iterable[int | None]) -> None:
        """A batch is formed: from here on nobody is owed what was served before `queued`, who still have something, had
        their turns."""
        self._now = max(self._now, min(map(self.turn, queued), default=max(self._served_until.values(), default=0.0)))

    def to_state(self) -> list[Any]:
        return [self._now, list(self._served_until.items())]

    def set_state(self, state: list[Any]) -> None:
        self._now, self._served_until = state[0], dict(state[1])
