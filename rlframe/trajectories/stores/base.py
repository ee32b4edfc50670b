"""The contract of a store: an ordered durable log with payloads. `MemoryStore` keeps them in memory.

The service is a deterministic state machine. A command takes effect by its place in the log; whoever reads the log
from a snapshot on computes the same state. The bytes of a group are a payload: they stay in the store until a batch
needs them, so the queue may be larger than memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

from rlframe.errors import StoreError, UnavailableError


class RecordsDroppedError(UnavailableError):
    """Records after the position that was asked for went with a newer snapshot: `load` it, and read on from there."""


class Store(Protocol):
    """An ordered durable log with payloads. Every method may be called from any thread, and none waits for ever.

    Attributes:
        shared: whether other processes append too, so that only `read` tells the order: it is a `SharedStore`.
        durability: a sentence for people: what an acknowledged append survives.
    """

    shared: bool
    durability: str

    def append(self, record: bytes, payload: bytes | None = None) -> Future[int]:
        """Put a record at the end of the log, and the payload, if any, beside it. Does not wait.

        Returns:
            Its position, 1 or more, once it is durable. Positions have no gaps, and of two calls in one process the
            later one gets the higher position. Futures are resolved in the order of positions, by one thread, which
            runs their callbacks: these must be short. They cannot be cancelled.

            A future that raises `UnavailableError` left nothing behind; one that raises `PeerError` may have been
            applied (`read` tells); after a `StoreError` the store takes no more.

        Raises:
            UnavailableError: too much waits to be written, or the store is closed.
            StoreError: the store failed before.
        """

    def room(self) -> int | None:
        """Bytes of payloads that its disk still takes; None where it cannot tell."""

    def check_room(self, size: int) -> None:
        """Raise `UnavailableError` where its disk has no room for payloads of so many bytes. To records without one it
        does not apply: they empty the queue."""

    def read(self, after: int, limit: int = 1000) -> list[tuple[int, bytes]]:
        """The first `limit` records at positions above `after`, whoever appended them, with these positions.

        Raises:
            RecordsDroppedError: some of them went with a snapshot.
            StoreError: the log ends before `after`, or is no longer the one that was read: the store lost records.
        """

    def payloads(self, positions: Sequence[int]) -> list[bytes | None]:
        """The payloads stored under these positions. None: there was none, it was forgotten, or it is damaged."""

    def forget(self, positions: Iterable[int]) -> None:
        """Drop payloads; their space is used again. Does not wait, and may be undone by a crash: see `held`."""

    def held(self) -> list[int]:
        """The positions of all payloads, ascending.

        Whoever has replayed the log up to a position forgets those up to it that its state does not need: what a crash
        left behind.
        """

    def snapshot(self, position: int, state: bytes) -> Future[None]:
        """Keep `state`, which is what the records up to `position` lead to. These records may then be dropped.

        One that is not newer than the last is ignored. Payloads are not touched. Resolved when it is durable.
        """

    def load(self) -> tuple[int, bytes] | None:
        """The last snapshot's position and state; None if there is none. `read(after=position)` goes on from it."""

    def close(self) -> None:
        """Write what was appended, and let go of everything. May be called again."""


class SharedStore(Store, Protocol):
    """A store that other processes append to, too."""

    def wait(self, after: int, timeout: float) -> bool:
        """Wait until there is a record at a position above `after`, at most `timeout` seconds. Returns if there is.

        Raises:
            PeerError: the store did not answer, again and again.
        """


def check_range(after: int, first: int | None, last: int, name: str) -> None:
    """Refuse to read above `after` from a log that ends at `last`, and whose first record above it is at `first`."""
    if after > last:
        raise StoreError(f"{name} ends at position {last}, but was read up to {after} before: it lost records.")
    if after < last and first != after + 1:
        raise RecordsDroppedError(f"{name} no longer has the record at position {after + 1}: load the snapshot.")


class UnlimitedStore:
    """The part of `Store` about room, for a store without a disk."""

    def room(self) -> None:
        return None

    def check_room(self, size: int) -> None:
        pass


class MemoryStore(UnlimitedStore):
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
