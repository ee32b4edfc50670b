"""What waits to be batched: a first-in-first-out lane per environment and unit size, and sums over them kept as units
come and go. Groups of odd sizes wait apart until some of them are a unit.

Exact filling: which sizes sum to a target, if there are only so many of each. A set of reachable sums is one Python
int, bit `t` set if `t` can be reached, so taking up to `n` units of a size is about log2(n) shifts. The work depends on
the number of distinct sizes and on the target, never on how many units wait: more units of a size than fit into the
target count as many as fit. Answers are cached by those counts.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec

_Counts = tuple[tuple[int, int], ...]


def can_fill(target: int, counts: Mapping[int, int], spent: int | None = None) -> bool:
    """Whether units sum to `target` exactly.

    Args:
        target: the sum wanted; 0 is filled by nothing.
        counts: how many units there are of each size.
        spent: a size of which one unit counts as gone already.
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
        return True  # the smallest close every gap that the others leave: so it is with one size, or with powers of two
    return _fillable(target // unit, tuple((size // unit, count) for size, count in capped))


def usable_sizes(target: int, counts: Mapping[int, int]) -> frozenset[int]:
    """The sizes that take part in at least one exact filling of `target`."""
    return _usable(target, _capped(target, counts, None))


def oldest_fitting_size(target: int, counts: Mapping[int, int], age: Callable[[int], int]) -> int | None:
    """The size to take next: of those that leave what can still be filled, that with the smallest `age`; or None."""
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
    if sum(size * count for size, count in counts) < target:  # a short queue must not cost what a long batch does
        return frozenset()
    mask = (2 << target) - 1
    below = [1]  # below[i]: the sums that the first i sizes reach
    for size, count in counts:
        below.append(_spread(below[-1], size, count, mask))
    found = set()
    above = 1  # the sums that the sizes after this one reach
    for i in reversed(range(len(counts))):
        size, count = counts[i]
        with_one = _spread(above, size, count - 1, mask) << size & mask
        if below[i] & _mirrored(with_one, target):
            found.add(size)
        above |= with_one
    return frozenset(found)


def _spread(sums: int, size: int, count: int, mask: int) -> int:
    """The sums reached from `sums` with 0 to `count` more units of `size`."""
    chunk = 1
    while count > 0:
        step = min(chunk, count)
        sums |= sums << step * size & mask
        count -= step
        chunk *= 2
    return sums


def _mirrored(sums: int, target: int) -> int:
    """Bit t of the answer is bit `target - t` of `sums`."""
    return int(f"{sums:0{target + 1}b}"[::-1], 2)


class QueuedGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the queue knows of a group, or of a unit of several odd groups (`parts`, oldest first)."""

    id: int  # of a unit of several: that of the group that came last
    sequences: int
    size_bytes: int
    policy_version: int | None  # of a unit of several: the oldest
    added_at: float  # seconds
    parts: tuple[QueuedGroup, ...] = ()

    @property
    def groups(self) -> tuple[QueuedGroup, ...]:
        return self.parts or (self,)

    @classmethod
    def joined(cls, parts: Iterable[QueuedGroup]) -> QueuedGroup:
        """One unit of several groups."""
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


# As it waits: there are as many as the queue has groups, and an object with its numbers takes three times as much.
_packed = msgspec.msgpack.Encoder().encode
_unpacked = msgspec.msgpack.Decoder(QueuedGroup).decode


class UnitQueue:
    """The units of one size from one environment, oldest first. `env_id` is None where the sender did not say."""

    __slots__ = ("env_id", "groups", "size", "units")

    def __init__(self, env_id: int | None, size: int):
        self.env_id = env_id
        self.size = size
        self.units: deque[bytes] = deque()  # packed
        self.groups = 0

    def key(self) -> tuple[bool, int, int]:
        """By which lanes are put in an order that depends on nothing but what they hold."""
        return self.env_id is None, self.env_id or 0, self.size

    @property
    def head(self) -> QueuedGroup:
        """The oldest unit."""
        return _unpacked(self.units[0])

    @property
    def sequences(self) -> int:
        return len(self.units) * self.size


class UnitQueues:
    """All lanes, none of them empty.

    Attributes:
        counts: units of each size.
        groups: groups in the units of each size.
    """

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.groups: dict[int, int] = {}
        self._of_env: dict[int | None, dict[int, UnitQueue]] = {}
        self._of_size: dict[int, dict[int | None, UnitQueue]] = {}
        # Per size a heap of (id of a lane's head, env_id); entries of what is no longer a head are skipped at the top.
        self._heads: dict[int, list[tuple[int, int | None]]] = {}
        self._reserved: dict[tuple[int | None, int], int] = {}
        # packed[largest][size]: the sum over the lanes of that size of `_packed`, for each `largest` ever asked for.
        self._packed: dict[int, dict[int, int]] = {}

    def of_env(self, env_id: int | None) -> list[UnitQueue]:
        return list(self._of_env.get(env_id, {}).values())

    def of_sizes(self, sizes: Iterable[int]) -> Iterator[UnitQueue]:
        return (lane for size in sizes for lane in self._of_size[size].values())

    def __iter__(self) -> Iterator[UnitQueue]:
        return (lane for lanes in self._of_env.values() for lane in lanes.values())

    def ids(self) -> Iterator[int]:
        """Of all groups."""
        return (part.id for lane in self for unit in lane.units for part in _unpacked(unit).groups)

    def push(self, env_id: int | None, size: int, unit: QueuedGroup, *, again: bool = False) -> None:
        """Put a unit behind the others of its lane, or `again`, after it was popped, before them."""
        lane = self._lane(env_id, size)
        if again:
            lane.units.appendleft(_packed(unit))
        else:
            lane.units.append(_packed(unit))
        self._count(lane, 1, len(unit.groups))
        if again or len(lane.units) == 1:
            self._note_head(lane)

    def pop(self, lane: UnitQueue) -> QueuedGroup:
        """Take the oldest unit of a lane."""
        unit = _unpacked(lane.units.popleft())
        self._count(lane, -1, -len(unit.groups))
        if lane.units:
            self._note_head(lane)
        else:
            self._drop(lane)
        return unit

    def oldest(self, size: int) -> UnitQueue:
        """The lane whose head is the oldest unit of this size, of which there is one."""
        heads = self._heads[size]
        while True:
            unit_id, env_id = heads[0]
            lane = self._of_size[size].get(env_id)
            if lane is not None and lane.head.id == unit_id:
                return lane
            heapq.heappop(heads)

    def reserve(self, env_id: int, size: int, sequences: int) -> None:
        """Say how many sequences of a lane are the minimum share of its environment: other envs do not count these."""
        lane = self._of_env.get(env_id, {}).get(size)
        if lane is not None:
            self._repack(lane, -1)
        self._reserved[env_id, size] = sequences
        if not sequences:
            del self._reserved[env_id, size]
        if lane is not None:
            self._repack(lane, 1)

    def packed(self, largest: int, sizes: Iterable[int], without: int | None) -> int:
        """Sequences of these sizes in packs of `largest`, less what is reserved, in all lanes but those of one env."""
        if largest not in self._packed:
            sums: dict[int, int] = defaultdict(int)
            for lane in self:
                sums[lane.size] += self._packs(lane, largest)
            self._packed[largest] = sums
        own = self._of_env.get(without, {})
        sums = self._packed[largest]
        return sum(sums[size] - (self._packs(own[size], largest) if size in own else 0) for size in sizes)

    def to_state(self) -> list[Any]:
        """Quick, however much waits: the units as they are, packed."""
        return [[lane.env_id, lane.size, list(lane.units)] for lane in sorted(self, key=UnitQueue.key)]

    @classmethod
    def from_state(cls, state: list[Any]) -> UnitQueues:
        lanes = cls()
        for env_id, size, units in state:
            for unit in units:
                lanes.push(env_id, size, _unpacked(unit))
        return lanes

    def _lane(self, env_id: int | None, size: int) -> UnitQueue:
        lane = self._of_env.get(env_id, {}).get(size)
        if lane is None:
            lane = UnitQueue(env_id, size)
            self._of_env.setdefault(env_id, {})[size] = lane
            self._of_size.setdefault(size, {})[env_id] = lane
        return lane

    def _drop(self, lane: UnitQueue) -> None:
        del self._of_env[lane.env_id][lane.size], self._of_size[lane.size][lane.env_id]
        if not self._of_env[lane.env_id]:
            del self._of_env[lane.env_id]
        if not self._of_size[lane.size]:
            del self._of_size[lane.size], self._heads[lane.size], self.counts[lane.size], self.groups[lane.size]

    def _count(self, lane: UnitQueue, units: int, groups: int) -> None:
        size = lane.size
        self.counts[size] = self.counts.get(size, 0) + units
        self.groups[size] = self.groups.get(size, 0) + groups
        lane.groups += groups
        for largest, sums in self._packed.items():
            now = len(lane.units)
            sums[size] += self._packs(lane, largest) - self._packs(lane, largest, now - units)

    def _repack(self, lane: UnitQueue, sign: int) -> None:
        for largest, sums in self._packed.items():
            sums[lane.size] += sign * self._packs(lane, largest)

    def _packs(self, lane: UnitQueue, largest: int, units: int | None = None) -> int:
        sequences = (len(lane.units) if units is None else units) * lane.size
        return max(0, -(-sequences // largest) * largest - self._reserved.get((lane.env_id, lane.size), 0))

    def _note_head(self, lane: UnitQueue) -> None:
        heads = self._heads.setdefault(lane.size, [])
        lanes = self._of_size[lane.size]
        if len(heads) > 2 * len(lanes) + 64:  # mostly leftovers of units that were taken and put back
            heads[:] = [(other.head.id, env_id) for env_id, other in lanes.items()]
            heapq.heapify(heads)
        else:
            heapq.heappush(heads, (lane.head.id, lane.env_id))


class UndersizedGroups:
    """The groups of one environment that are smaller than its unit size. No subset of them sums to it."""

    def __init__(self) -> None:
        self._of_size: dict[int, deque[QueuedGroup]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of_size.values()))

    @property
    def sequences(self) -> int:
        return sum(size * len(groups) for size, groups in self._of_size.items())

    def add(self, group: QueuedGroup, unit_size: int) -> QueuedGroup | None:
        """Add a group. Returns the unit that it completes, whose groups leave, or None.

        Which groups: the oldest first, passing over those after which no sum could be exact.
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

    @classmethod
    def of(cls, groups: Iterable[QueuedGroup]) -> UndersizedGroups:
        """Those that `oldest_first` gave."""
        odd = cls()
        for group in groups:
            odd._of_size.setdefault(group.sequences, deque()).append(group)
        return odd
