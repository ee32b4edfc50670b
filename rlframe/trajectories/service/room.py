"""How many bytes of groups the service may keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlframe.errors import UnavailableError

if TYPE_CHECKING:
    from rlframe.trajectories.service.service import Service

_NEARLY = 0.8  # of the bytes that may be kept


class Room:
    """At most `max_bytes` of groups, and no more than the store's disk has room for: commands that empty the queue need
    some of it, too."""

    def __init__(self, service: Service, max_bytes: int) -> None:
        self._service = service
        self._max_bytes = max_bytes

    @property
    def limit(self) -> int:
        """Bytes that may be kept."""
        left = self._service.store.room()
        return self._max_bytes if left is None else min(self._max_bytes, self._service.stored_bytes + left)

    @property
    def nearly_full(self) -> bool:
        """Whether environments should hold."""
        return self._service.stored_bytes + self._service.pending_bytes >= _NEARLY * self.limit

    def check(self, size: int) -> None:
        """Raise `UnavailableError` where so many bytes more are too much."""
        kept, pending = self._service.stored_bytes, self._service.pending_bytes
        if kept + pending + size > self._max_bytes:
            raise UnavailableError(f"The service keeps {kept >> 20} MB, its limit. Trainers have to take some first.")
        self._service.store.check_room(pending + size)
