"""The interface of a store, which is an ordered, durable log with payloads. `MemoryStore` is a store in memory.

The service is a deterministic state machine. Commands take effect in the order of the log, so every process that reads
the log after a snapshot computes the same state. A payload is the bytes of one group. Payloads stay in the store until
a batch needs them, so the queue may be larger than memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

from rlframe.errors import StoreError, UnavailableError


class RecordsDroppedError(UnavailableError):
    """The requested records were replaced by a newer snapshot. Call `load`, and read after the snapshot's position."""


class Store(Protocol):
    """An ordered, durable log with payloads. Any thread may call any method, and no method waits forever.

    Attributes:
        shared: True if several processes append. Then the store is a `SharedStore`, and only `read` shows the order.
        durability: A sentence for users: the failures that do not destroy an acknowledged append.
    """

    shared: bool
    durability: str

    def append(self, record: bytes, payload: bytes | None = None) -> Future[int]:
        """Append a record to the log, with an optional payload. This call does not wait.

        Returns:
            A future. When the record is durable, its result is the position of the record, 1 or more. Positions have
            no gaps. If a process calls this twice, the second record gets the higher position. One thread resolves the
            futures in the order of positions, and runs their callbacks, which must be short. Futures cannot be
            cancelled.

            If the error is an `UnavailableError`, nothing was stored. After a `PeerError`, use `read` to find out
            whether the record was stored. After a `StoreError`, the store accepts nothing more.

        Raises:
            UnavailableError: Too many bytes wait to be written, or the store is closed.
            StoreError: The store failed before.
        """

    def room(self) -> int | None:
        """Return the number of bytes of payloads that fit on the disk, or None if it is unknown."""

    def check_room(self, size: int) -> None:
        """Raise `UnavailableError` if payloads of `size` bytes do not fit on the disk.

        Records without payloads are not limited, because commands that empty the queue are such records.
        """

    def read(self, after: int, limit: int = 1000) -> list[tuple[int, bytes]]:
        """Return (position, record) of the first `limit` records of all processes after position `after`.

        Raises:
            RecordsDroppedError: Some of the records were replaced by a snapshot.
            StoreError: The store lost records: the log ends before `after`, or has other records than before.
        """

    def payloads(self, positions: Sequence[int]) -> list[bytes | None]:
        """Return the payloads at these positions. None stands for a payload that is missing, deleted or damaged."""

    def delete_payloads(self, positions: Iterable[int]) -> None:
        """Delete payloads without waiting, so that their space is reused. A crash may undo a deletion."""

    def payload_positions(self) -> list[int]:
        """Return the positions of all payloads, ascending.

        After a process has replayed the log, it deletes the payloads that its state does not need. They are in the
        store because a crash prevented their deletion.
        """

    def snapshot(self, position: int, state: bytes) -> Future[None]:
        """Store `state`, the result of all records up to `position`. The store may then drop these records.

        A snapshot that is not newer than the last snapshot is ignored. Payloads are not dropped. The future resolves
        when the snapshot is durable.
        """

    def load(self) -> tuple[int, bytes] | None:
        """Return (position, state) of the last snapshot, or None. `read(after=position)` returns the later records."""

    def close(self) -> None:
        """Write all pending appends, and release all resources. A second call does nothing."""


class SharedStore(Store, Protocol):
    """A `Store` to which several processes append."""

    def wait(self, after: int, timeout: float) -> bool:
        """Wait up to `timeout` seconds for a record after position `after`. Return True if there is such a record.

        Raises:
            PeerError: The store did not answer, despite retries.
        """


def check_range(after: int, first: int | None, last: int, name: str) -> None:
    """Raise an error if the records after `after` cannot be read.

    Args:
        first: Position of the first record after `after`, or None if there is no such record.
        last: Position of the last record in the log.
        name: Name of the store for messages.
    """
    if after > last:
        raise StoreError(f"{name} ends at position {last}, but was read up to {after} before: it lost records.")
    if after < last and first != after + 1:
        raise RecordsDroppedError(f"{name} no longer has the record at position {after + 1}: load the snapshot.")


class UnlimitedStore:
    """The methods of `Store` about free space, for a store whose space is not limited by a disk."""

    def room(self) -> None:
        return None

    def check_room(self, size: int) -> None:
        pass


class MemoryStore(UnlimitedStore):
    """A `Store` in memory. Its data is lost when the process ends. A snapshot only drops records."""

    shared = False
    durability = "Nothing survives the end of this process."

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first = 1  # position of the first stored record
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

    def read(self, after: int, limit: int = 1000) -> list[tuple[int, bytes]]:
        with self._lock:
            first = max(after + 1, self._first)
            check_range(after, first, self._last, "The trajectory store in memory")
            found = self._records[first - self._first :][:limit]
        return list(enumerate(found, start=first))

    def payloads(self, positions: Sequence[int]) -> list[bytes | None]:
        return [self._payloads.get(position) for position in positions]

    def delete_payloads(self, positions: Iterable[int]) -> None:
        with self._lock:
            for position in positions:
                self._payloads.pop(position, None)

    def payload_positions(self) -> list[int]:
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
