"""FIFO queues of units that wait to be batched. There is one queue for each environment and unit size.

`UnitQueues` updates its sums when a unit is added or removed. Undersized groups wait separately until they form a unit.

A batch is full if the sizes of its units sum to a target. One Python int represents a set of possible sums: bit `t` is
set if the sum `t` is possible. To add up to `n` units of one size takes about log2(n) shifts. Units beyond the target
are not counted. So the cost depends on the number of distinct sizes and on the target. It does not depend on the number
of queued units. Results are cached by the counts of units.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

_Counts = tuple[tuple[int, int], ...]


def can_fill(target: int, counts: Mapping[int, int], spent: int | None = None) -> bool:
    """Return True if some of the units have sizes that sum to exactly `target`.

    Args:
        target: The required sum. A target of 0 is always possible.
        counts: Number of units of each size.
        spent: Size of one unit in `counts` that is already used. None means that no unit is used.
    """
    if target <= 0:
        return target == 0
    capped = _capped(target, counts, spent)
    if sum(size * count for size, count in capped) < target:
        return False
    unit = math.gcd(*(size for size, _ in capped))
    if target % unit:
        return False
    smallest, count = capped[0]
    if smallest == unit and (count + 1) * unit >= capped[-1][0]:
        return True  # the smallest units can fill every gap, for example if all sizes are powers of two
    return _fillable(target // unit, tuple((size // unit, count) for size, count in capped))


def usable_sizes(target: int, counts: Mapping[int, int]) -> frozenset[int]:
    """Return the unit sizes that occur in at least one set of units with the sum `target`."""
    return _usable(target, _capped(target, counts, None))


def oldest_fitting_size(target: int, counts: Mapping[int, int], age: Callable[[int], int]) -> int | None:
    """Return the size with the smallest `age` for which other units can fill the rest of `target`, or None."""
    for size in sorted((size for size, count in counts.items() if count and size <= target), key=age):
        if can_fill(target - size, counts, spent=size):
            return size
    return None


def _capped(target: int, counts: Mapping[int, int], spent: int | None) -> _Counts:
    capped = []
    for size, count in counts.items():
        if size == spent:
            count -= 1
        if count > 0 and size <= target:
            capped.append((size, min(count, target // size)))
    capped.sort()
    return tuple(capped)


@lru_cache(maxsize=16_384)
def _fillable(target: int, counts: _Counts) -> bool:
    mask = (2 << target) - 1
    sums = 1
    for size, count in counts:
        sums = _spread(sums, size, count, mask)
    return bool(sums >> target & 1)


@lru_cache(maxsize=1024)
def _usable(target: int, counts: _Counts) -> frozenset[int]:
    if sum(size * count for size, count in counts) < target:  # a fast check: too few sequences are queued
        return frozenset()
    mask = (2 << target) - 1
    below = [1]  # below[i]: possible sums of units of the first i sizes
    for size, count in counts:
        below.append(_spread(below[-1], size, count, mask))
    found = set()
    above = 1  # possible sums of units of the sizes after size i
    for i in reversed(range(len(counts))):
        size, count = counts[i]
        with_one = _spread(above, size, count - 1, mask) << size & mask
        if below[i] & _mirrored(with_one, target):
            found.add(size)
        above |= with_one
    return frozenset(found)


def _spread(sums: int, size: int, count: int, mask: int) -> int:
    """Return the possible sums if 0 to `count` units of `size` are added to each sum in `sums`."""
    chunk = 1
    while count > 0:
        step = min(chunk, count)
        sums |= sums << step * size & mask
        count -= step
        chunk *= 2
    return sums


def _mirrored(sums: int, target: int) -> int:
    """Return the bits of `sums` in reverse order: bit `t` becomes bit `target - t`."""
    return int(f"{sums:0{target + 1}b}"[::-1], 2)


class QueuedGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A queued group, or a unit of several undersized groups (`parts`, oldest first)."""

    id: int  # id of the group; for a unit, id of its newest group
    sequences: int
    size_bytes: int
    policy_version: int | None  # version of the group's policy; for a unit, its oldest version
    added_at: float  # seconds
    parts: tuple[QueuedGroup, ...] = ()

    @property
    def groups(self) -> tuple[QueuedGroup, ...]:
        return self.parts or (self,)

    @classmethod
    def joined(cls, parts: Iterable[QueuedGroup]) -> QueuedGroup:
        """Join several groups into one unit."""
        parts = tuple(sorted(parts, key=lambda part: part.id))
        versions = [part.policy_version for part in parts if part.policy_version is not None]
        return cls(
            id=parts[-1].id,
            sequences=sum(part.sequences for part in parts),
            size_bytes=sum(part.size_bytes for part in parts),
            policy_version=min(versions, default=None),
            added_at=min(part.added_at for part in parts),
            parts=parts,
        )


# Queued units are stored encoded, because Python objects take three times as much memory.
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(QueuedGroup).decode


@dataclass(eq=False, slots=True)
class UnitQueue:
    """The units of one size from one environment, oldest first. `env_id` is None for unregistered senders."""

    env_id: int | None
    size: int
    units: deque[bytes] = field(default_factory=deque)  # encoded
    groups: int = 0

    def key(self) -> tuple[bool, int, int]:
        """Return a sort key that gives the same order in every process."""
        return self.env_id is None, self.env_id or 0, self.size

    @property
    def head(self) -> QueuedGroup:
        """The oldest unit."""
        return _decode(self.units[0])

    @property
    def sequences(self) -> int:
        return len(self.units) * self.size


class UnitQueues:
    """All unit queues that are not empty.

    Attributes:
        counts: Number of units of each size.
        groups: Number of groups in the units of each size.
    """

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.groups: dict[int, int] = {}
        self._of_env: dict[int | None, dict[int, UnitQueue]] = {}
        self._of_size: dict[int, dict[int | None, UnitQueue]] = {}
        # For each size, a heap of (id of the oldest unit in a queue, env_id). Outdated entries at the top are removed.
        self._heads: dict[int, list[tuple[int, int | None]]] = {}
        self._reserved: Counter[tuple[int | None, int]] = Counter()
        # _pack_sums[largest][size]: sum of `_packed_size` over the queues of that size, for each requested `largest`.
        self._pack_sums: dict[int, dict[int, int]] = {}

    def of_env(self, env_id: int | None) -> list[UnitQueue]:
        return list(self._of_env.get(env_id, {}).values())

    def of_sizes(self, sizes: Iterable[int]) -> Iterator[UnitQueue]:
        return (queue for size in sizes for queue in self._of_size[size].values())

    def __iter__(self) -> Iterator[UnitQueue]:
        return (queue for unit_queues in self._of_env.values() for queue in unit_queues.values())

    def ids(self) -> Iterator[int]:
        """Return the ids of all groups in the queues."""
        return (part.id for queue in self for unit in queue.units for part in _decode(unit).groups)

    def push(self, env_id: int | None, size: int, unit: QueuedGroup, *, again: bool = False) -> None:
        """Append a unit to its queue. With `again`, insert it at the front instead, to undo a `pop`."""
        queue = self._of_env.get(env_id, {}).get(size)
        if queue is None:
            queue = UnitQueue(env_id, size)
            self._of_env.setdefault(env_id, {})[size] = queue
            self._of_size.setdefault(size, {})[env_id] = queue
        if again:
            queue.units.appendleft(_encode(unit))
        else:
            queue.units.append(_encode(unit))
        self._count(queue, 1, len(unit.groups))
        if again or len(queue.units) == 1:
            self._note_head(queue)

    def pop(self, queue: UnitQueue) -> QueuedGroup:
        """Remove and return the oldest unit of a queue."""
        unit = _decode(queue.units.popleft())
        self._count(queue, -1, -len(unit.groups))
        if queue.units:
            self._note_head(queue)
        else:
            self._drop(queue)
        return unit

    def oldest(self, size: int) -> UnitQueue:
        """Return the queue with the oldest unit of this size. At least one such unit must exist."""
        heads = self._heads[size]
        while True:
            unit_id, env_id = heads[0]
            queue = self._of_size[size].get(env_id)
            if queue is not None and queue.head.id == unit_id:
                return queue
            heapq.heappop(heads)

    def reserve(self, env_id: int, size: int, sequences: int) -> None:
        """Reserve queued sequences of an environment and unit size. `packed_sequences` does not count them."""
        queue = self._of_env.get(env_id, {}).get(size)
        if queue is not None:
            self._repack(queue, -1)
        self._reserved[env_id, size] = sequences
        if queue is not None:
            self._repack(queue, 1)

    def packed_sequences(self, largest: int, sizes: Iterable[int], without: int | None) -> int:
        """Return the number of queued sequences in units of these sizes, without the reserved sequences.

        The number in each queue is rounded up to a multiple of `largest`. Queues of environment `without` do not count.
        """
        if largest not in self._pack_sums:
            sums: dict[int, int] = defaultdict(int)
            for queue in self:
                sums[queue.size] += self._packed_size(queue, largest)
            self._pack_sums[largest] = sums
        own = self._of_env.get(without, {})
        sums = self._pack_sums[largest]
        return sum(sums[size] - (self._packed_size(own[size], largest) if size in own else 0) for size in sizes)

    def to_state(self) -> list[Any]:
        """Return the state. This is fast, because the units are not decoded."""
        return [[queue.env_id, queue.size, list(queue.units)] for queue in sorted(self, key=UnitQueue.key)]

    @classmethod
    def from_state(cls, state: list[Any]) -> UnitQueues:
        unit_queues = cls()
        for env_id, size, units in state:
            for unit in units:
                unit_queues.push(env_id, size, _decode(unit))
        return unit_queues

    def _drop(self, queue: UnitQueue) -> None:
        del self._of_env[queue.env_id][queue.size], self._of_size[queue.size][queue.env_id]
        if not self._of_env[queue.env_id]:
            del self._of_env[queue.env_id]
        if not self._of_size[queue.size]:
            del self._of_size[queue.size], self._heads[queue.size], self.counts[queue.size], self.groups[queue.size]

    def _count(self, queue: UnitQueue, units: int, groups: int) -> None:
        size = queue.size
        self.counts[size] = self.counts.get(size, 0) + units
        self.groups[size] = self.groups.get(size, 0) + groups
        queue.groups += groups
        for largest, sums in self._pack_sums.items():
            now = len(queue.units)
            sums[size] += self._packed_size(queue, largest) - self._packed_size(queue, largest, now - units)

    def _repack(self, queue: UnitQueue, sign: int) -> None:
        for largest, sums in self._pack_sums.items():
            sums[queue.size] += sign * self._packed_size(queue, largest)

    def _packed_size(self, queue: UnitQueue, largest: int, units: int | None = None) -> int:
        sequences = (len(queue.units) if units is None else units) * queue.size
        return max(0, -(-sequences // largest) * largest - self._reserved[queue.env_id, queue.size])

    def _note_head(self, queue: UnitQueue) -> None:
        heads = self._heads.setdefault(queue.size, [])
        unit_queues = self._of_size[queue.size]
        if len(heads) > 2 * len(unit_queues) + 64:  # more than half of the entries are outdated
            heads[:] = [(other.head.id, env_id) for env_id, other in unit_queues.items()]
            heapq.heapify(heads)
        else:
            heapq.heappush(heads, (queue.head.id, queue.env_id))


class UndersizedGroups:
    """Groups of one environment that are smaller than its unit size. They cannot form a unit yet.

    Args:
        groups: The result of `oldest_first`.
    """

    def __init__(self, groups: Iterable[QueuedGroup] = ()) -> None:
        self._of_size: dict[int, deque[QueuedGroup]] = {}
        for group in groups:
            self._of_size.setdefault(group.sequences, deque()).append(group)

    def __len__(self) -> int:
        return sum(map(len, self._of_size.values()))

    @property
    def sequences(self) -> int:
        return sum(size * len(groups) for size, groups in self._of_size.items())

    def add(self, group: QueuedGroup, unit_size: int) -> QueuedGroup | None:
        """Add a group. If a unit can be formed now, remove its groups and return the unit. Otherwise return None.

        A unit contains the oldest groups whose sizes can sum to exactly the unit size.
        """
        self._of_size.setdefault(group.sequences, deque()).append(group)
        counts = {size: len(groups) for size, groups in self._of_size.items()}
        if not can_fill(unit_size, counts):
            return None
        parts = []
        while unit_size:
            size = oldest_fitting_size(unit_size, counts, lambda size: self._of_size[size][0].id)
            assert size is not None
            parts.append(self._of_size[size].popleft())
            counts[size] -= 1
            unit_size -= size
        self._of_size = {size: groups for size, groups in self._of_size.items() if groups}
        return QueuedGroup.joined(parts)

    def oldest_first(self) -> list[QueuedGroup]:
        return sorted((group for groups in self._of_size.values() for group in groups), key=lambda group: group.id)
