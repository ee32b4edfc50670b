"""Answers that are given again: batches under a lease, and the answers to the latest keyed requests."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple, Union

import msgspec
from msgspec.structs import replace

MAX_CONSUMERS = 1024  # whose last request is remembered
ANSWER_KEPT = 3600.0  # seconds for which it is


class LeasedBatch(msgspec.Struct, frozen=True):
    """A batch as a consumer gets it.

    Attributes:
        group_ids: in serving order, oldest first.
        step: the training step that it is for; redelivery does not change it.
        staleness: of each group, how many policy versions older than the current one; None where either is unknown.
        delivery: 1 for the first time it is handed out.
        lease_until: when it goes to somebody else unless acknowledged, in seconds; None where it is acknowledged.
        consumer: whose the lease is.
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


_Answered = tuple[str, LeasedBatch, float]  # a request, the batch that answered it, when


class Leases:
    """The batches whose payloads are still needed.

    Attributes:
        out: batches under a lease, by batch_id.
        returned: those that came back, by batch_id; the first one that did is the first.
    """

    def __init__(self) -> None:
        self.out: dict[int, LeasedBatch] = {}
        self.returned: dict[int, LeasedBatch] = {}
        self._earliest = math.inf  # no lease ends before
        # The last request of each consumer, the earliest first; a batch without a lease is kept here for as long.
        self._answered: OrderedDict[str, _Answered] = OrderedDict()

    @property
    def unacknowledged(self) -> list[LeasedBatch]:
        """Batches that are leased or came back."""
        return [*self.out.values(), *self.returned.values()]

    @property
    def kept(self) -> list[LeasedBatch]:
        """Batches without a lease that are kept for the same request again."""
        return [batch for _, batch, _ in self._answered.values() if batch.lease_until is None]

    def recall(self, consumer: str, request: str | None) -> LeasedBatch | None:
        """The batch that this request was answered with, if it is still this consumer's or nobody else's."""
        known, batch, _ = self._answered.get(consumer, (None, None, None))
        if batch is None or request is None or known != request:
            return None
        if batch.lease_until is None:
            return batch
        return self._held(batch.batch_id, consumer) or self.returned.get(batch.batch_id)

    def answer(self, consumer: str, request: str, batch: LeasedBatch, now: float) -> None:
        self._answered[consumer] = (request, batch, now)

    def drop_answers(self, consumer: str) -> list[LeasedBatch]:
        """Forget the consumer's last request, and those of who has not asked for longest where they are too many.

        Returns the batches without a lease that were only kept for these.
        """
        answered = [self._answered.pop(consumer)] if consumer in self._answered else []
        while len(self._answered) >= MAX_CONSUMERS:
            answered.append(self._answered.popitem(last=False)[1])
        return [batch for _, batch, _ in answered if batch.lease_until is None]

    def hand_out(self, batch: LeasedBatch, consumer: str | None, until: float | None) -> LeasedBatch:
        """Hand a new batch, or one that came back, to a consumer: until then, or for good."""
        if self.returned.pop(batch.batch_id, None) is not None:
            batch = replace(batch, delivery=batch.delivery + 1)
        batch = replace(batch, lease_until=until, consumer=consumer)
        if until is not None:
            self._lease(batch, until)
        return batch

    def settle(self, batch_id: int) -> LeasedBatch | None:
        """Take out a batch that is done with: leased, or come back in the meantime. None where there is none."""
        return self.out.pop(batch_id, None) or self.returned.pop(batch_id, None)

    def give_back(self, batch_id: int, consumer: str | None) -> bool:
        """The holder (or, where `consumer` is None, anyone) gives a leased batch back. False where it is not his."""
        if self._held(batch_id, consumer) is None:
            return False
        self.returned[batch_id] = self.out.pop(batch_id)
        return True

    def renew(self, batch_id: int, consumer: str | None, until: float) -> bool:
        """The holder (or, where `consumer` is None, anyone) has it until then. False where it is not his."""
        batch = self._held(batch_id, consumer)
        if batch is None:
            return False
        self._lease(replace(batch, lease_until=until), until)
        return True

    def due(self, now: float) -> bool:
        """Whether the lease of a batch has ended, or an answer was remembered for long enough."""
        if self._earliest <= now:  # perhaps of a batch that is done with, or was renewed
            self._earliest = min((end for end, _ in self._ends()), default=math.inf)
        return self._earliest <= now or self._answer_is_old(now)

    def expire(self, now: float) -> list[LeasedBatch]:
        """Take back the batches whose leases have ended. Return those without a lease that were only kept for requests
        of long ago."""
        if not self.due(now):
            return []
        for end, batch_id in sorted(self._ends()):
            if end <= now:
                self.give_back(batch_id, None)
        old = []
        while self._answer_is_old(now):
            old.append(self._answered.popitem(last=False)[1][1])
        return [batch for batch in old if batch.lease_until is None]

    def held(self) -> Iterator[int]:
        """The groups of all batches that may be asked for (again)."""
        return (group_id for batch in (*self.unacknowledged, *self.kept) for group_id in batch.group_ids)

    def _held(self, batch_id: int, consumer: str | None) -> LeasedBatch | None:
        """Return a leased batch if this consumer (None: anyone) holds it."""
        batch = self.out.get(batch_id)
        return batch if batch is not None and consumer in (None, batch.consumer) else None

    def _lease(self, batch: LeasedBatch, until: float) -> None:
        self.out[batch.batch_id] = batch
        self._earliest = min(self._earliest, until)

    def _ends(self) -> Iterator[tuple[float, int]]:
        return ((batch.lease_until or 0.0, batch_id) for batch_id, batch in self.out.items())

    def _answer_is_old(self, now: float) -> bool:
        first = next(iter(self._answered.values()), None)
        return first is not None and first[2] + ANSWER_KEPT <= now

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
MAX_AGE = 3600.0  # seconds

_Kept = dict[str, Union[int, None]]  # sequences left in the buffer, None where the group was received


class AddResult(NamedTuple):
    """`status` is "received", "buffered" (not of its environment's group size) or "refused" (nothing was kept).

    A repeated idempotency key gets the first answer again, with `duplicate` set and without the id.
    """

    status: str
    group_id: int | None = None
    buffer_size: int | None = None  # sequences left in the buffer, where buffered
    duplicate: bool = False
    reason: str | None = None  # a sentence, where refused
    too_large: bool = False  # refused because no batch can hold it: no retry will do better
    too_old: bool = False  # refused, and it gets no younger


class IdempotencyKeys:
    """key -> answer, for the last `MAX_KEYS` keys of the last `MAX_AGE` seconds, and for some before these.

    They are forgotten by the generation: all that are older than the younger one, which is as long as that.
    """

    def __init__(self) -> None:
        self._younger: _Kept = {}
        self._older: _Kept = {}
        self._since = 0.0  # when the younger one began, in seconds

    def get(self, key: str, now: float) -> AddResult | None:
        age = now - self._since
        if age >= MAX_AGE:
            self._turn(now, self._younger if age < 2 * MAX_AGE else {})
        for kept in (self._younger, self._older):
            if key in kept:
                left = kept[key]
                return AddResult("received" if left is None else "buffered", buffer_size=left, duplicate=True)
        return None

    def put(self, key: str, answer: AddResult, now: float) -> None:
        if len(self._younger) >= MAX_KEYS:
            self._turn(now, self._younger)
        self._younger[key] = answer.buffer_size

    def to_state(self) -> list[Any]:
        """Quick, however many there are."""
        generations = (self._older, self._younger)
        return [[[list(kept), list(kept.values())] for kept in generations], self._since]

    @classmethod
    def from_state(cls, state: list[Any]) -> IdempotencyKeys:
        known = cls()
        known._older, known._younger = (dict(zip(keys, values)) for keys, values in state[0])
        known._since = state[1]
        return known

    def _turn(self, now: float, older: _Kept) -> None:
        """Begin another generation."""
        self._older, self._younger, self._since = older, {}, now
