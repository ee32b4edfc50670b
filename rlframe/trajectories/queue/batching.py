"""Form one batch from the unit queues. Minimum shares come first, then the oldest units or units by weight.

A batch is formed only if it is exactly full.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rlframe.trajectories.queue.unit_queues import QueuedGroup, UnitQueue, UnitQueues, can_fill, oldest_fitting_size


class MinimumShare(NamedTuple):
    """The number of sequences in each batch that are reserved for one live environment."""

    env_id: int
    unit_size: int  # number of sequences in each unit of the environment; 1 if unknown
    sequences: int


class TakenUnit(NamedTuple):
    env_id: int | None
    size: int
    unit: QueuedGroup


def missing_shares(batch_size: int, unit_queues: UnitQueues, shares: Sequence[MinimumShare]) -> list[MinimumShare]:
    """Return the shares that the next batch waits for. Their environments have no queued unit that fits.

    A batch does not wait for an environment whose units can never fit. If an environment fills only a part of its
    share, the batch does not wait for the rest. Other environments fill it, as in atroposlib's server.
    """
    missing = []
    for share in shares:
        sizes = {queue.size for queue in unit_queues.of_env(share.env_id)}
        if share.sequences and not any(can_fill(batch_size - size, unit_queues.counts, spent=size) for size in sizes):
            missing.append((share, {*sizes, share.unit_size}))
    coming = {**unit_queues.counts, **dict.fromkeys((size for _, sizes in missing for size in sizes), batch_size)}
    return [share for share, sizes in missing if any(can_fill(batch_size - size, coming, spent=size) for size in sizes)]


def form_batch(
    batch_size: int,
    unit_queues: UnitQueues,
    shares: Sequence[MinimumShare],
    too_old: Callable[[QueuedGroup], bool],
    weights: StartTimeFairQueue | None = None,
) -> tuple[list[TakenUnit] | None, list[TakenUnit]]:
    """Take exactly `batch_size` sequences from `unit_queues`. Also remove units that are too old.

    Args:
        weights: Order in which units are taken after the minimum shares. None means oldest first.

    Returns:
        (units of the batch, removed old units). The units of the batch are sorted, oldest first. They are None if no
        batch can be formed.
    """
    dropped: list[TakenUnit] = []
    while can_fill(batch_size, unit_queues.counts) and not missing_shares(batch_size, unit_queues, shares):
        known = len(dropped)
        virtual_times = [] if weights is None else weights.to_state()
        builder = _BatchBuilder(batch_size, unit_queues, too_old, dropped, weights)
        builder.take_minimum_shares(shares)
        filled = builder.fill_oldest_first() if weights is None else builder.fill_by_weight(weights)
        if filled and len(dropped) == known:  # after a removal of old units, check the shares again
            if weights is not None:
                weights.end_batch({queue.env_id for queue in unit_queues})
            return sorted(builder.taken, key=lambda taken: taken.unit.id), dropped
        for taken in reversed(builder.taken):
            unit_queues.push(*taken, again=True)
        if weights is not None:
            weights.set_state(virtual_times)
        if len(dropped) == known:
            break
    return None, dropped


class _BatchBuilder:
    def __init__(
        self,
        batch_size: int,
        unit_queues: UnitQueues,
        too_old: Callable[[QueuedGroup], bool],
        dropped: list[TakenUnit],
        weights: StartTimeFairQueue | None,
    ) -> None:
        self.taken: list[TakenUnit] = []
        self._weights = weights
        self._unit_queues = unit_queues
        self._too_old = too_old
        self._dropped = dropped
        self._left = batch_size

    def fill_oldest_first(self) -> bool:
        """Fill the rest of the batch, oldest units first. Return True if the batch is full."""
        while self._left:
            size = oldest_fitting_size(
                self._left, self._unit_queues.counts, lambda size: self._unit_queues.oldest(size).head.id
            )
            if size is None:
                return False
            self._take(self._unit_queues.oldest(size))
        return True

    def fill_by_weight(self, weights: StartTimeFairQueue) -> bool:
        """Fill the rest of the batch in the order of start tags. Return True if the batch is full."""
        turns = [
            (weights.start_tag(env_id), env_id is None, env_id or 0)
            for env_id in {queue.env_id for queue in self._unit_queues}
        ]
        heapq.heapify(turns)
        passed = []  # environments without a unit that fits into the batch now
        while self._left and turns:
            _, anonymous, number = turn = heapq.heappop(turns)
            env_id = None if anonymous else number
            queue = self._oldest_fitting(env_id, self._left)
            if queue is None:
                passed.append(turn)
                continue
            self._take(queue)
            heapq.heappush(turns, (weights.start_tag(env_id), anonymous, number))
            for other in passed:
                heapq.heappush(turns, other)
            passed = []
        return not self._left

    def take_minimum_shares(self, shares: Sequence[MinimumShare]) -> None:
        """Take the minimum share of each environment in whole units, or less if too few units are queued.

        A share is rounded up to whole units if an exact batch remains possible. Otherwise it is rounded down.
        """
        got = dict.fromkeys((share.env_id for share in shares), 0)
        for beyond in (False, True):  # first take units within each share, then one more unit if the share is not full
            for share in shares:
                while got[share.env_id] < share.sequences:
                    room = self._left if beyond else share.sequences - got[share.env_id]
                    queue = self._oldest_fitting(share.env_id, room)
                    if queue is None:
                        break
                    got[share.env_id] += self._take(queue)

    def _oldest_fitting(self, env_id: int | None, room: int) -> UnitQueue | None:
        """Return the environment's queue with the oldest unit that fits into `room` and allows an exact batch."""
        unit_queues = sorted(self._unit_queues.of_env(env_id), key=lambda queue: queue.head.id)
        counts = self._unit_queues.counts
        fits = (
            queue
            for queue in unit_queues
            if queue.size <= room and can_fill(self._left - queue.size, counts, queue.size)
        )
        return next(fits, None)

    def _take(self, queue: UnitQueue) -> int:
        """Take the oldest unit of a queue, and drop units that are too old. Return the number of sequences taken."""
        while queue.units:
            taken = TakenUnit(queue.env_id, queue.size, self._unit_queues.pop(queue))
            if self._too_old(taken.unit):
                self._dropped.append(taken)
                continue
            self.taken.append(taken)
            self._left -= queue.size
            if self._weights is not None:
                self._weights.serve(queue.env_id, queue.size)
            return queue.size
        return 0


class StartTimeFairQueue:
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996).

    Environments with queued units are served in proportion to their weights. If an environment has no queued units for
    some time, it does not get a larger share later. Each environment's virtual time is the number of its served
    sequences, divided by its weight.

    Args:
        weight_of: A function from an environment's id (None for unregistered senders) to its weight, more than 0.
    """

    def __init__(self, weight_of: Callable[[int | None], float]) -> None:
        self._weight_of = weight_of
        self._now = 0.0
        self._served_until: dict[int | None, float] = {}

    def start_tag(self, env_id: int | None) -> float:
        """Return an environment's start tag, in virtual time. The environment with the lowest tag is served next."""
        return max(self._now, self._served_until.get(env_id, 0.0))

    def serve(self, env_id: int | None, sequences: int) -> None:
        """Record that sequences of an environment were served."""
        self._served_until[env_id] = self.start_tag(env_id) + sequences / self._weight_of(env_id)

    def end_batch(self, queued: Iterable[int | None]) -> None:
        """After a batch, advance virtual time to the lowest start tag of the environments in `queued`.

        Because of this, environments without queued units do not get a larger share later.
        """
        self._now = max(
            self._now, min(map(self.start_tag, queued), default=max(self._served_until.values(), default=0.0))
        )

    def to_state(self) -> list[Any]:
        return [self._now, list(self._served_until.items())]

    def set_state(self, state: list[Any]) -> None:
        self._now, self._served_until = state[0], dict(state[1])
