"""Leased batches, and earlier results, which are kept to answer repeated requests."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple, Union

import msgspec
from msgspec.structs import replace

MAX_CONSUMERS = 1024  # maximum number of consumers whose last request is kept
ANSWER_TTL = 3600.0  # seconds after which an answer is dropped


class LeasedBatch(msgspec.Struct, frozen=True):
    """A batch that was delivered to a consumer.

    Attributes:
        group_ids: Ids of the groups in the order in which they are served, oldest first.
        step: Training step of the batch. Redelivery does not change it.
        staleness: For each group, the number of policy versions between its policy and the trainer's. None if unknown.
        delivery: Number of deliveries of this batch. 1 for the first delivery.
        lease_until: End of the lease in seconds. None if the batch was acknowledged at delivery.
        consumer: Owner of the lease.
    """

    batch_id: int
    group_ids: tuple[int, ...]
    step: int
    sequences: int
    size_bytes: int
    staleness: tuple[int | None, ...]
    delivery: int = 1
    lease_until: float | None = None
    consumer: str | None = None


_Answered = tuple[str, LeasedBatch, float]  # (key of the request, batch in the answer, time of the answer in seconds)


class Leases:
    """The batches whose payloads are still needed.

    Attributes:
        out: Leased batches, by batch_id.
        returned: Batches that wait for redelivery, by batch_id, in the order in which they were returned.
    """

    def __init__(self) -> None:
        self.out: dict[int, LeasedBatch] = {}
        self.returned: dict[int, LeasedBatch] = {}
        self._earliest = math.inf  # no lease ends before this time
        # The last request of each consumer, earliest first. A batch without a lease is dropped with its request.
        self._answered: OrderedDict[str, _Answered] = OrderedDict()

    @property
    def unacknowledged(self) -> list[LeasedBatch]:
        """Batches that are leased or wait for redelivery."""
        return [*self.out.values(), *self.returned.values()]

    @property
    def kept(self) -> list[LeasedBatch]:
        """Batches without a lease that are kept for a repeated request."""
        return [batch for _, batch, _ in self._answered.values() if batch.lease_until is None]

    def find_answered(self, consumer: str, request: str | None) -> LeasedBatch | None:
        """Return the batch of an earlier request with this key. Return None if another consumer now has the batch."""
        known, batch, _ = self._answered.get(consumer, (None, None, None))
        if batch is None or request is None or known != request:
            return None
        if batch.lease_until is None:
            return batch
        return self._held_by(batch.batch_id, consumer) or self.returned.get(batch.batch_id)

    def record_answer(self, consumer: str, request: str, batch: LeasedBatch, now: float) -> None:
        self._answered[consumer] = (request, batch, now)

    def drop_answers(self, consumer: str) -> list[LeasedBatch]:
        """Drop the consumer's last request. If there are too many requests, also drop the oldest ones.

        Returns:
            Batches without a lease that were kept only for these requests.
        """
        answered = [self._answered.pop(consumer)] if consumer in self._answered else []
        while len(self._answered) >= MAX_CONSUMERS:
            answered.append(self._answered.popitem(last=False)[1])
        return [batch for _, batch, _ in answered if batch.lease_until is None]

    def hand_out(self, batch: LeasedBatch, consumer: str | None, until: float | None) -> LeasedBatch:
        """Deliver a new or returned batch to a consumer. The lease ends at `until`; None means no lease."""
        if self.returned.pop(batch.batch_id, None) is not None:
            batch = replace(batch, delivery=batch.delivery + 1)
        batch = replace(batch, lease_until=until, consumer=consumer)
        if until is not None:
            self._lease(batch, until)
        return batch

    def remove(self, batch_id: int) -> LeasedBatch | None:
        """Remove and return a batch that is leased or waits for redelivery. Return None if there is no such batch."""
        return self.out.pop(batch_id, None) or self.returned.pop(batch_id, None)

    def give_back(self, batch_id: int, consumer: str | None) -> bool:
        """End a lease, so that the batch waits for redelivery. Return False if `consumer` does not own the lease.

        A `consumer` of None ends the lease of any owner.
        """
        if self._held_by(batch_id, consumer) is None:
            return False
        self.returned[batch_id] = self.out.pop(batch_id)
        return True

    def renew(self, batch_id: int, consumer: str | None, until: float) -> bool:
        """Extend a lease to `until`. Return False if `consumer` does not own the lease. None is any owner."""
        batch = self._held_by(batch_id, consumer)
        if batch is None:
            return False
        self._lease(replace(batch, lease_until=until), until)
        return True

    def due(self, now: float) -> bool:
        """Return True if `expire` would change anything."""
        if self._earliest <= now:  # `_earliest` can be outdated, because leases are renewed and acknowledged
            self._earliest = min((end for end, _ in self._ends()), default=math.inf)
        return self._earliest <= now or self._answer_is_old(now)

    def expire(self, now: float) -> list[LeasedBatch]:
        """Take back the batches whose leases have ended.

        Returns:
            Batches without a lease whose requests are now too old to be repeated.
        """
        if not self.due(now):
            return []
        for end, batch_id in sorted(self._ends()):
            if end <= now:
                self.give_back(batch_id, None)
        old = []
        while self._answer_is_old(now):
            old.append(self._answered.popitem(last=False)[1][1])
        return [batch for batch in old if batch.lease_until is None]

    def needed_group_ids(self) -> Iterator[int]:
        """Return the ids of all groups in batches that may be requested again."""
        return (group_id for batch in (*self.unacknowledged, *self.kept) for group_id in batch.group_ids)

    def _held_by(self, batch_id: int, consumer: str | None) -> LeasedBatch | None:
        """Return a leased batch if `consumer` owns it. Otherwise return None. A `consumer` of None is any owner."""
        batch = self.out.get(batch_id)
        return batch if batch is not None and consumer in (None, batch.consumer) else None

    def _lease(self, batch: LeasedBatch, until: float) -> None:
        self.out[batch.batch_id] = batch
        self._earliest = min(self._earliest, until)

    def _ends(self) -> Iterator[tuple[float, int]]:
        return ((batch.lease_until or 0.0, batch_id) for batch_id, batch in self.out.items())

    def _answer_is_old(self, now: float) -> bool:
        first = next(iter(self._answered.values()), None)
        return first is not None and first[2] + ANSWER_TTL <= now

    def to_state(self) -> list[Any]:
        answered = [[consumer, *answer] for consumer, answer in self._answered.items()]
        return [[(batch, batch.consumer) for batch in self.out.values()], list(self.returned.values()), answered]

    @classmethod
    def from_state(cls, state: list[Any]) -> Leases:
        leases = cls()
        for batch, consumer in msgspec.convert(state[0], list[tuple[LeasedBatch, str | None]]):
            leases._lease(replace(batch, consumer=consumer), batch.lease_until or 0.0)
        leases.returned = {batch.batch_id: batch for batch in msgspec.convert(state[1], list[LeasedBatch])}
        answered = msgspec.convert(state[2], list[tuple[str, str, LeasedBatch, float]])
        leases._answered = OrderedDict((consumer, (request, batch, at)) for consumer, request, batch, at in answered)
        return leases


MAX_KEYS = 100_000
KEY_TTL = 3600.0  # seconds

_Generation = dict[
    str, Union[int, None]
]  # key -> number of sequences left in the buffer, or None if the status was "received"


class AddResult(NamedTuple):
    """The result of `Queue.add`.

    `status` is "received", "buffered" (the group does not have its environment's group size) or "refused" (nothing was
    stored). If an idempotency key is repeated, the first result is repeated with `duplicate` True and `group_id` None.
    """

    status: str
    group_id: int | None = None
    buffer_size: int | None = None  # if `status` is "buffered": number of sequences left in the buffer
    duplicate: bool = False
    reason: str | None = None  # if `status` is "refused": a sentence with the reason
    too_large: bool = False  # True if no batch can hold the group; a retry cannot help
    too_old: bool = False  # True if the group is too old; a retry cannot help


class IdempotencyKeys:
    """Results by idempotency key, for at least the last `MAX_KEYS` keys of the last `KEY_TTL` seconds.

    The keys form two generations. When the younger generation is full or too old, it replaces the older generation.
    """

    def __init__(self) -> None:
        self._younger: _Generation = {}
        self._older: _Generation = {}
        self._since = 0.0  # start of the younger generation, in seconds

    def get(self, key: str, now: float) -> AddResult | None:
        age = now - self._since
        if age >= KEY_TTL:
            self._start_generation(now, self._younger if age < 2 * KEY_TTL else {})
        for kept in (self._younger, self._older):
            if key in kept:
                left = kept[key]
                return AddResult("received" if left is None else "buffered", buffer_size=left, duplicate=True)
        return None

    def put(self, key: str, answer: AddResult, now: float) -> None:
        if len(self._younger) >= MAX_KEYS:
            self._start_generation(now, self._younger)
        self._younger[key] = answer.buffer_size

    def to_state(self) -> list[Any]:
        """Return the state as plain lists. This is fast, because no Python code runs for each key."""
        generations = (self._older, self._younger)
        return [[[list(kept), list(kept.values())] for kept in generations], self._since]

    @classmethod
    def from_state(cls, state: list[Any]) -> IdempotencyKeys:
        known = cls()
        known._older, known._younger = (dict(zip(keys, values)) for keys, values in state[0])
        known._since = state[1]
        return known

    def _start_generation(self, now: float, older: _Generation) -> None:
        self._older, self._younger, self._since = older, {}, now
