"""The latest groups of each run, for people who look."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping

KEPT = 20  # groups of a run
KEPT_BYTES = 64 << 20  # in memory, of all runs together; the newest group is kept however large it is


class Latest:
    """Where the latest groups lie in the store, and the payloads of those that came through this process, as far as
    memory is spared: a group that was served is in the store no longer."""

    def __init__(self) -> None:
        self._positions: dict[str, deque[int]] = {}
        self._payloads: OrderedDict[int, bytes] = OrderedDict()
        self._bytes = 0

    def add(self, run: str, position: int, payload: bytes | None) -> None:
        positions = self._positions.setdefault(run, deque(maxlen=KEPT))
        if len(positions) == KEPT:
            self._drop(positions[0])
        positions.append(position)
        if payload is not None:
            self._payloads[position] = payload
            self._bytes += len(payload)
        while self._bytes > KEPT_BYTES and len(self._payloads) > 1:
            self._drop(next(iter(self._payloads)))

    def clear(self, run: str) -> None:
        """The run starts afresh."""
        for position in self._positions.pop(run, ()):
            self._drop(position)

    def positions(self, run: str) -> list[int]:
        """Of the latest groups, oldest first."""
        return list(self._positions.get(run, ()))

    def missing(self, run: str, count: int) -> list[int]:
        """Positions of the latest `count` groups whose payloads have to be read from the store."""
        return [position for position in self._newest(run, count) if position not in self._payloads]

    def payloads(self, run: str, count: int, found: Mapping[int, bytes | None]) -> list[bytes]:
        """The latest `count`, newest first, with what the store has `found` of those that were missing."""
        known = (self._payloads.get(position) or found.get(position) for position in self._newest(run, count))
        return [payload for payload in known if payload is not None]

    def _newest(self, run: str, count: int) -> list[int]:
        return self.positions(run)[: -count - 1 : -1]

    def _drop(self, position: int) -> None:
        self._bytes -= len(self._payloads.pop(position, b""))
