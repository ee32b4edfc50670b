"""A store in this process's memory: for tests, and for runs whose data may go with the process."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from rlframe.errors import UnavailableError
from rlframe.trajectories.stores.base import check_range


class MemoryStore:
    """The contract of `Store` without durability: `snapshot` serves to drop records, nothing else."""

    shared = False
    durability = "Nothing survives the end of this process."

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first = 1  # the position of the first record that is kept
        self._records: list[bytes] = []
        self._payloads: dict[int, bytes] = {}
        self._snapshot: tuple[int, bytes] | None = None
        self._closed = False

    def append(self, record: bytes, payload: bytes | None = None) -> Future[int]:
        future: Future[int] = Future()
        with self._lock:
            if self._closed:
                raise UnavailableError("The trajectory store in memory is closed.")
            self._records.append(record)
            if payload is not None:
                self._payloads[self._last] = payload
            future.set_result(self._last)
        return future

    def room(self) -> None:
        return None

    def check_room(self, size: int) -> None:
        pass

    def read(self, after: int, limit: int = 1000) -> list[tuple[int, bytes]]:
        with self._lock:
            first = max(after + 1, self._first)
            check_range(after, first, self._last, "The trajectory store in memory")
            found = self._records[first - self._first :][:limit]
        return list(enumerate(found, start=first))

    def payloads(self, positions: Sequence[int]) -> list[bytes | None]:
        return [self._payloads.get(position) for position in positions]

    def forget(self, positions: Iterable[int]) -> None:
        with self._lock:
            for position in positions:
                self._payloads.pop(position, None)

    def held(self) -> list[int]:
        with self._lock:
            return list(self._payloads)

    def snapshot(self, position: int, state: bytes) -> Future[None]:
        done: Future[None] = Future()
        with self._lock:
            if self._snapshot is None or position > self._snapshot[0]:
                self._snapshot = (position, state)
                del self._records[: position + 1 - self._first]
                self._first = position + 1
        done.set_result(None)
        return done

    def load(self) -> tuple[int, bytes] | None:
        return self._snapshot

    def close(self) -> None:
        self._closed = True

    @property
    def _last(self) -> int:
        return self._first + len(self._records) - 1
