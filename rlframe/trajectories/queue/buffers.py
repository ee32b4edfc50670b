"""Groups of odd sizes, kept per environment until some of them sum to its unit size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from rlframe.trajectories.queue.lanes import Group
from rlframe.trajectories.queue.packing import fillable, oldest_fitting


class Buffer:
    """The odd groups of one environment. No subset of them sums to its unit size."""

    def __init__(self) -> None:
        self.groups = 0
        self.sequences = 0
        self._of_size: dict[int, deque[Group]] = {}

    def add(self, group: Group, unit_size: int) -> Group | None:
        """Adds a group. Returns the unit that it completes, which leaves the buffer, or None.

        Which groups: the oldest first, passing over those after which no sum could be exact.
        """
        self._of_size.setdefault(group.sequences, deque()).append(group)
        self.groups += 1
        self.sequences += group.sequences
        counts = {size: len(groups) for size, groups in self._of_size.items()}
        if not fillable(unit_size, counts):
            return None
        parts = []
        left = unit_size
        while left:
            size = oldest_fitting(left, counts, lambda size: self._of_size[size][0].id)
            assert size is not None
            parts.append(self._pop(size))
            counts[size] -= 1
            left -= size
        return Group.joined(parts)

    def drain(self) -> list[Group]:
        """Takes all groups out, oldest first."""
        groups = sorted(self.all_groups())
        self.__init__()  # type: ignore[misc]
        return groups

    def all_groups(self) -> Iterator[Group]:
        return (group for groups in self._of_size.values() for group in groups)

    def to_state(self) -> list[Any]:
        return [[group.packed() for group in groups] for _, groups in sorted(self._of_size.items())]

    @classmethod
    def from_state(cls, state: list[Any]) -> Buffer:
        buffer = cls()
        for groups in state:
            restored = deque(Group.unpacked(group) for group in groups)
            buffer._of_size[restored[0].sequences] = restored
            buffer.groups += len(restored)
            buffer.sequences += sum(group.sequences for group in restored)
        return buffer

    def _pop(self, size: int) -> Group:
        group = self._of_size[size].popleft()
        if not self._of_size[size]:
            del self._of_size[size]
        self.groups -= 1
        self.sequences -= size
        return group
