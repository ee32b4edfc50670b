"""Batches that were handed out: until when they are somebody's, and which of them came back."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

MAX_CONSUMERS = 1024  # whose last request is remembered
ANSWER_KEPT = 3600.0  # seconds for which it is


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as a consumer gets it.

    Attributes:
        group_ids: in serving order, oldest first.
        step: the training step that it is for; redelivery does not change it.
        staleness: of each group, how many policy versions older than the current one; None where either is unknown.
        delivery: 1 for the first time it is handed out.
        lease_until: when it goes to somebody else unless acknowledged, in seconds; None where it is acknowledged.
    """

    batch_id: int
    group_ids: tuple[int, ...]
    step: int
    sequences: int
    size_bytes: int
    staleness: tuple[int | None, ...]
    delivery: int = 1
    lease_until: float | None = None

    def to_state(self) -> dict[str, Any]:
        return {**asdict(self), "group_ids": list(self.group_ids), "staleness": list(self.staleness)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Batch:
        lists = {name: tuple(state[name]) for name in ("group_ids", "staleness")}
        return cls(**{**state, **lists})


class Leases:
    """The batches whose payloads are still needed.

    Attributes:
        groups: in batches that are leased or came back.
        expired: ids of the batches that the last `expire` took back.
    """

    def __init__(self) -> None:
        self.groups = 0
        self.expired: list[int] = []
        self._out: dict[int, tuple[Batch, str | None]] = {}  # batch_id -> (batch, consumer)
        self._returned: OrderedDict[int, Batch] = OrderedDict()
        self._deadlines: list[tuple[float, int]] = []  # of `_out`, and leftovers
        # consumer -> (its last request, the batch that answered it, when), the earliest first; a batch without a lease
        # is kept here for as long
        self._answered: OrderedDict[str, tuple[str, Batch, float]] = OrderedDict()

    @property
    def outstanding(self) -> int:
        return len(self._out)

    @property
    def returned(self) -> int:
        return len(self._returned)

    @property
    def kept(self) -> int:
        """Batches without a lease that are kept for the same request again."""
        return sum(batch.lease_until is None for _, batch, _ in self._answered.values())

    def recall(self, consumer: str, request: str | None) -> Batch | None:
        """The batch that this request was answered with, if it is still this consumer's or nobody else's."""
        known, batch, _ = self._answered.get(consumer, (None, None, None))
        if batch is None or request is None or known != request:
            return None
        if batch.lease_until is None:
            return batch
        out, holder = self._out.get(batch.batch_id, (None, None))
        return out if holder == consumer else self._returned.get(batch.batch_id)

    def answer(self, consumer: str, request: str, batch: Batch, now: float) -> None:
        self._answered[consumer] = (request, batch, now)

    def forget_answers(self, consumer: str) -> list[Batch]:
        """Forgets the consumer's last request, and those of who has not asked for longest where they are too many.

        Returns the batches without a lease that were only kept for these.
        """
        answered = [self._answered.pop(consumer)] if consumer in self._answered else []
        while len(self._answered) >= MAX_CONSUMERS:
            answered.append(self._answered.popitem(last=False)[1])
        return [batch for _, batch, _ in answered if batch.lease_until is None]

    def hand_out(self, batch: Batch, consumer: str | None, until: float | None) -> Batch:
        """Hands a new batch, or one that came back, to a consumer: until then, or for good."""
        if self._returned.pop(batch.batch_id, None) is not None:
            self.groups -= len(batch.group_ids)
            batch = replace(batch, delivery=batch.delivery + 1)
        batch = replace(batch, lease_until=until)
        if until is None:
            return batch
        self.groups += len(batch.group_ids)
        self._lease(batch, consumer, until)
        return batch

    def came_back(self, batch_id: int) -> bool:
        return batch_id in self._returned

    def oldest_returned(self) -> Batch | None:
        return next(iter(self._returned.values()), None)

    def settle(self, batch_id: int) -> Batch | None:
        """Takes out a batch that is done with: leased, or come back in the meantime. None where there is none."""
        batch, _ = self._out.pop(batch_id, (None, None))
        batch = batch or self._returned.pop(batch_id, None)
        if batch is not None:
            self.groups -= len(batch.group_ids)
        return batch

    def give_back(self, batch_id: int, consumer: str | None) -> bool:
        """The holder (or, where `consumer` is None, anyone) gives a leased batch back. False where it is not his."""
        if batch_id not in self._out or consumer not in (None, self._out[batch_id][1]):
            return False
        self._returned[batch_id] = self._out.pop(batch_id)[0]
        return True

    def renew(self, batch_id: int, consumer: str | None, until: float) -> bool:
        """The holder (or, where `consumer` is None, anyone) has it until then. False where it is not his."""
        batch, holder = self._out.get(batch_id, (None, None))
        if batch is None or consumer not in (None, holder):
            return False
        self._lease(replace(batch, lease_until=until), holder, until)
        return True

    def due(self, now: float) -> bool:
        """Whether the lease of a batch has ended, or an answer was remembered for long enough."""
        return self._lease_ended(now) or self._answer_is_old(now)

    def _answer_is_old(self, now: float) -> bool:
        return any(at + ANSWER_KEPT <= now for _, _, at in islice(self._answered.values(), 1))

    def _lease_ended(self, now: float) -> bool:
        while self._deadlines:
            until, batch_id = self._deadlines[0]
            out = self._out.get(batch_id)
            if out is not None and out[0].lease_until == until:
                return until <= now
            heapq.heappop(self._deadlines)
        return False

    def expire(self, now: float) -> list[Batch]:
        """Takes back the batches whose leases have ended: `expired`. Returns those without a lease that were only kept
        for requests of long ago."""
        self.expired = []
        while self._lease_ended(now):
            batch_id = self._deadlines[0][1]
            self.give_back(batch_id, None)
            self.expired.append(batch_id)
        old = []
        while self._answer_is_old(now):
            old.append(self._answered.popitem(last=False)[1][1])
        return [batch for batch in old if batch.lease_until is None]

    def held(self) -> Iterator[int]:
        """The groups of all batches that may be asked for (again)."""
        batches = [batch for batch, _ in self._out.values()] + list(self._returned.values())
        batches += [batch for _, batch, _ in self._answered.values() if batch.lease_until is None]
        return (group_id for batch in batches for group_id in batch.group_ids)

    def _lease(self, batch: Batch, consumer: str | None, until: float) -> None:
        self._out[batch.batch_id] = (batch, consumer)
        if len(self._deadlines) > 2 * len(self._out) + 64:  # mostly of batches that are done with, or were renewed
            self._deadlines = _deadlines(self._out)
        else:
            heapq.heappush(self._deadlines, (until, batch.batch_id))

    def to_state(self) -> list[Any]:
        return [
            [[batch.to_state(), consumer] for batch, consumer in self._out.values()],
            [batch.to_state() for batch in self._returned.values()],
            [[consumer, request, batch.to_state(), at] for consumer, (request, batch, at) in self._answered.items()],
        ]

    @classmethod
    def from_state(cls, state: list[Any]) -> Leases:
        leases = cls()
        for batch, consumer in state[0]:
            restored = Batch.from_state(batch)
            leases._out[restored.batch_id] = (restored, consumer)
        leases._deadlines = _deadlines(leases._out)
        leases._returned = OrderedDict((batch["batch_id"], Batch.from_state(batch)) for batch in state[1])
        leases._answered = OrderedDict(
            (consumer, (request, Batch.from_state(batch), at)) for consumer, request, batch, at in state[2]
        )
        kept = [batch for batch, _ in leases._out.values()] + list(leases._returned.values())
        leases.groups = sum(len(batch.group_ids) for batch in kept)
        return leases


def _deadlines(out: dict[int, tuple[Batch, str | None]]) -> list[tuple[float, int]]:
    heap = [(batch.lease_until, batch_id) for batch_id, (batch, _) in out.items() if batch.lease_until is not None]
    heapq.heapify(heap)
    return heap
