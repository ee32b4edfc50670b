"""What waits to be batched: a first-in-first-out lane per environment and unit size, and sums over them kept as units
come and go. Groups of odd sizes wait apart until some of them are a unit."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from rlframe.trajectories.queue.packing import fillable, oldest_fitting


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


class Lane:
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


class Lanes:
    """All lanes, none of them empty.

    Attributes:
        counts: units of each size.
        groups: groups in the units of each size.
    """

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.groups: dict[int, int] = {}
        self._of_env: dict[int | None, dict[int, Lane]] = {}
        self._of_size: dict[int, dict[int | None, Lane]] = {}
        # Per size a heap of (id of a lane's head, env_id); entries of what is no longer a head are skipped at the top.
        self._heads: dict[int, list[tuple[int, int | None]]] = {}
        self._reserved: dict[tuple[int | None, int], int] = {}
        # packed[largest][size]: the sum over the lanes of that size of `_packed`, for each `largest` ever asked for.
        self._packed: dict[int, dict[int, int]] = {}

    def of_env(self, env_id: int | None) -> list[Lane]:
        return list(self._of_env.get(env_id, {}).values())

    def of_sizes(self, sizes: Iterable[int]) -> Iterator[Lane]:
        return (lane for size in sizes for lane in self._of_size[size].values())

    def __iter__(self) -> Iterator[Lane]:
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

    def pop(self, lane: Lane) -> QueuedGroup:
        """Take the oldest unit of a lane."""
        unit = _unpacked(lane.units.popleft())
        self._count(lane, -1, -len(unit.groups))
        if lane.units:
            self._note_head(lane)
        else:
            self._drop(lane)
        return unit

    def oldest(self, size: int) -> Lane:
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
        return [[lane.env_id, lane.size, list(lane.units)] for lane in sorted(self, key=Lane.key)]

    @classmethod
    def from_state(cls, state: list[Any]) -> Lanes:
        lanes = cls()
        for env_id, size, units in state:
            for unit in units:
                lanes.push(env_id, size, _unpacked(unit))
        return lanes

    def _lane(self, env_id: int | None, size: int) -> Lane:
        lane = self._of_env.get(env_id, {}).get(size)
        if lane is None:
            lane = Lane(env_id, size)
            self._of_env.setdefault(env_id, {})[size] = lane
            self._of_size.setdefault(size, {})[env_id] = lane
        return lane

    def _drop(self, lane: Lane) -> None:
        del self._of_env[lane.env_id][lane.size], self._of_size[lane.size][lane.env_id]
        if not self._of_env[lane.env_id]:
            del self._of_env[lane.env_id]
        if not self._of_size[lane.size]:
            del self._of_size[lane.size], self._heads[lane.size], self.counts[lane.size], self.groups[lane.size]

    def _count(self, lane: Lane, units: int, groups: int) -> None:
        size = lane.size
        self.counts[size] = self.counts.get(size, 0) + units
        self.groups[size] = self.groups.get(size, 0) + groups
        lane.groups += groups
        for largest, sums in self._packed.items():
            now = len(lane.units)
            sums[size] += self._packs(lane, largest) - self._packs(lane, largest, now - units)

    def _repack(self, lane: Lane, sign: int) -> None:
        for largest, sums in self._packed.items():
            sums[lane.size] += sign * self._packs(lane, largest)

    def _packs(self, lane: Lane, largest: int, units: int | None = None) -> int:
        sequences = (len(lane.units) if units is None else units) * lane.size
        return max(0, -(-sequences // largest) * largest - self._reserved.get((lane.env_id, lane.size), 0))

    def _note_head(self, lane: Lane) -> None:
        heads = self._heads.setdefault(lane.size, [])
        lanes = self._of_size[lane.size]
        if len(heads) > 2 * len(lanes) + 64:  # mostly leftovers of units that were taken and put back
            heads[:] = [(other.head.id, env_id) for env_id, other in lanes.items()]
            heapq.heapify(heads)
        else:
            heapq.heappush(heads, (lane.head.id, lane.env_id))


class OddGroups:
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
        if not fillable(unit_size, counts):
            return None
        parts = []
        while unit_size:
            size = oldest_fitting(unit_size, counts, lambda size: self._of_size[size][0].id)
            assert size is not None
            parts.append(self._of_size[size].popleft())
            counts[size] -= 1
            unit_size -= size
        self._of_size = {size: groups for size, groups in self._of_size.items() if groups}
        return QueuedGroup.joined(parts)

    def oldest_first(self) -> list[QueuedGroup]:
        return sorted((group for groups in self._of_size.values() for group in groups), key=lambda group: group.id)

    @classmethod
    def of(cls, groups: Iterable[QueuedGroup]) -> OddGroups:
        """Those that `oldest_first` gave."""
        odd = cls()
        for group in groups:
            odd._of_size.setdefault(group.sequences, deque()).append(group)
        return odd
