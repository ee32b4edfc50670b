"""The contract of a store: an ordered, durable log with payloads. `MemoryStore` keeps it in memory.

The service is a deterministic state machine. A command takes effect by its position in the log, so every process that
reads the log after a snapshot computes the same state. The bytes of a group are a payload. Payloads stay in the store
until a batch needs them, so the queue may be larger than memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

from rlframe.errors import StoreError, UnavailableError


class RecordsDroppedError(UnavailableError):
    """The requested records were replaced by a newer snapshot: `load` it, and read after its position."""


class Store(Protocol):
    """An ordered, durable log with payloads. Any thread may call any method, and no method waits forever.

    Attributes:
        shared: Whether other processes append too. Then only `read` shows the order, and the store is a `SharedStore`.
        durability: A sentence for users: which failures an acknowledged append survives.
    """

    shared: bool
    durability: str

    def append(self, record: bytes, payload: bytes | None = None) -> Future[int]:
        """Append a record to the log, with an optional payload. Does not wait.

        Returns:
            A future with the position of the record, 1 or more, once it is durable. Positions have no gaps. Of two
            calls in one process, the later one gets the higher position. One thread resolves the futures in the order
            of positions. It runs their callbacks, which must be short. Futures cannot be cancelled.

            After an `UnavailableError`, nothing was stored. After a `PeerError`, the record may have been stored, which
            `read` shows. After a `StoreError`, the store accepts nothing more.

        Raises:
            UnavailableError: Too many bytes wait to be written, or the store is closed.
            StoreError: The store failed before.
        """

    def room(self) -> int | None:
        """Return the bytes of payloads for which the disk has room, or None if unknown."""

    def check_room(self, size: int) -> None:
        """Raise `UnavailableError` if the disk has no room for payloads of `size` bytes.

        This does not limit records without payloads, because they empty the queue.
        """

    def read(self, after: int, limit: int = 1000) -> list[tuple[int, bytes]]:
        """Return the first `limit` records after position `after`, from all processes, with their positions.

        Raises:
            RecordsDroppedError: Some of the records were replaced by a snapshot.
            StoreError: The log ends before `after`, or is not the log that was read before: the store lost records.
        """

    def payloads(self, positions: Sequence[int]) -> list[bytes | None]:
        """Return the payloads at these positions. None means that there is none, or that it was deleted or damaged."""

    def delete_payloads(self, positions: Iterable[int]) -> None:
        """Delete payloads to reuse their space. Does not wait. A crash may undo it: see `payload_positions`."""

    def payload_positions(self) -> list[int]:
        """Return the positions of all payloads, ascending.

        After a process has replayed the log, it deletes the payloads that its state does not need: a crash left them
        behind.
        """

    def snapshot(self, position: int, state: bytes) -> Future[None]:
        """Store `state`, the result of the records up to `position`. These records may then be dropped.

        A snapshot that is not newer than the last one is ignored. Payloads stay. The future resolves when the snapshot
        is durable.
        """

    def load(self) -> tuple[int, bytes] | None:
        """Return position and state of the last snapshot, or None. `read(after=position)` returns later records."""

    def close(self) -> None:
        """Write all pending appends, and release all resources. It may be called again."""


class SharedStore(Store, Protocol):
    """A store to which several processes append."""

    def wait(self, after: int, timeout: float) -> bool:
        """Wait up to `timeout` seconds for a record after position `after`. Return whether there is one.

        Raises:
            PeerError: The store did not answer, despite retries.
        """


def check_range(after: int, first: int | None, last: int, name: str) -> None:
    """Raise an error if the records after `after` cannot be read.

    Args:
        first: Position of the first record after `after`, or None.
        last: Position of the last record.
        name: Name of the store in messages.
    """
    if after > last:
        raise StoreError(f"{name} ends at position {last}, but was read up to {after} before: it lost records.")
    if after < last and first != after + 1:
        raise RecordsDroppedError(f"{name} no longer has the record at position {after + 1}: load the snapshot.")


class UnlimitedStore:
    """The methods of `Store` that check free space, for a store without a disk."""

    def room(self) -> None:
        return None

    def check_room(self, size: int) -> None:
        pass


class MemoryStore(UnlimitedStore):
    """A `Store` in memory, without durability. A snapshot only drops records."""

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
