"""The latest groups of a run, for people who look."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

KEPT = 20
KEPT_BYTES = 16 << 20  # in memory, beside the newest one


class Latest:
    """Where the latest groups lie in the store, and the payloads of those that came through this process, as far as
    memory is spared: a group that was served is in the store no longer."""

    def __init__(self) -> None:
        self._groups: deque[tuple[int, bytes | None]] = deque(maxlen=KEPT)

    def add(self, position: int, payload: bytes | None) -> None:
        self._groups.append((position, payload))
        size = 0
        for i in range(len(self._groups) - 1, -1, -1):
            kept = self._groups[i][1]
            size += len(kept or b"")
            if size > KEPT_BYTES and kept is not None and i < len(self._groups) - 1:
                self._groups[i] = (self._groups[i][0], None)

    def missing(self, count: int) -> list[int]:
        """Positions of the latest `count` groups whose payloads have to be read from the store."""
        return [position for position, payload in list(self._groups)[-count:] if payload is None]

    def payloads(self, count: int, found: Mapping[int, bytes | None]) -> list[bytes]:
        """The latest `count`, newest first, with what the store has `found` of those that were missing."""
        latest = list(self._groups)[-count:][::-1]
        known = (payload if payload is not None else found.get(position) for position, payload in latest)
        return [payload for payload in known if payload is not None]
