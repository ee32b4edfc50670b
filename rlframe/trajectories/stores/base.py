"""The interface of a store, which is an ordered, durable log with payloads. `MemoryStore` is a store in memory.

The service is a deterministic state machine. Commands take effect in the order of the log, so every process that reads
the log after a snapshot computes the same state. A payload is the bytes of one group. Payloads stay in the store until
a batch needs them, so the queue may be larger than memory.

`GroupCommitStore` is the base class of stores that write to a disk or a server: one thread writes all data. Appends
that arrive during a commit go into the next commit.
"""

from __future__ import annotations

import abc
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
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


MAX_WAITING_BYTES = 256 << 20  # maximum bytes of waiting appends, without those that are being written
MAX_COMMIT_BYTES = 16 << 20  # maximum bytes of one commit; a single append can be larger
MAX_COMMIT_RECORDS = 1024
MAX_COMMIT_DELETIONS = 2000  # SQLite takes 5 ms for them, and appends wait for that time
CLOSE_DEADLINE = 60.0  # seconds for the last commits of a store; over a network, single commits also have a deadline


@dataclass(frozen=True, eq=False)
class Append:
    record: bytes
    payload: bytes | None
    future: Future[int]
    since: float  # time of the append, by `time.monotonic`

    @property
    def size(self) -> int:
        return len(self.record) + len(self.payload or b"")


@dataclass
class Commit:
    """Writes that are committed together: all of them or none. `refuse` removes one append from the commit."""

    appends: list[Append] = field(default_factory=list)
    deleted: list[int] = field(default_factory=list)  # positions of payloads to delete
    snapshot: tuple[int, bytes] | None = None
    refused: list[tuple[Append, Exception]] = field(default_factory=list)

    def refuse(self, append: Append, error: Exception) -> None:
        """Remove an append from the commit. The append fails with `error`. The other writes are still made."""
        self.appends.remove(append)
        self.refused.append((append, error))


class GroupCommitStore(abc.ABC):
    """The methods of `Store` that write. One thread passes appends, deletions and snapshots to `_write`.

    The constructor starts the thread, so a subclass must be ready to write before it calls the constructor.

    Args:
        name: Name of the store for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._appends: deque[Append] = deque()
        self._waiting_bytes = 0
        self._to_delete: list[int] = []
        self._snapshots: list[tuple[int, bytes, Future[None]]] = []
        self._due = False  # True if there is something to commit; failed deletions wait for the next append
        self._closed = False
        self._failed: StoreError | None = None
        self._thread = threading.Thread(target=self._run, name=f"writer of {name}", daemon=True)
        self._thread.start()

    def append(self, record: bytes, payload: bytes | None = None) -> Future[int]:
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # the future cannot be cancelled, because the write may have begun
        append = Append(record, payload, future, time.monotonic())
        with self._changed:
            self._check_open()
            if self._appends and self._waiting_bytes + append.size > MAX_WAITING_BYTES:
                raise UnavailableError(
                    f"{self._name} is behind: {self._waiting_bytes >> 20} MB wait to be written. Send it again later."
                )
            self._appends.append(append)
            self._waiting_bytes += append.size
            self._wake()
        return future

    def delete_payloads(self, positions: Iterable[int]) -> None:
        with self._changed:
            self._check_open()
            self._to_delete.extend(positions)
            self._wake()

    def snapshot(self, position: int, state: bytes) -> Future[None]:
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        with self._changed:
            self._check_open()
            self._snapshots.append((position, state, future))
            self._wake()
        return future

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_DEADLINE)
        if self._thread.is_alive():
            raise UnavailableError(f"{self._name} did not finish its writes within {CLOSE_DEADLINE:.0f} s.")

    @abc.abstractmethod
    def _write(self, commit: Commit) -> int:
        """Make a commit durable. Return the position of the first append; the other appends get the next positions.

        If this method raises, all futures of the commit get the error. After a `StoreError`, nothing more is written.
        """

    def _check_open(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._closed:
            raise UnavailableError(f"{self._name} is closed.")

    def _wake(self) -> None:
        self._due = True
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._closed)
                if not self._due:
                    return
                commit, snapshots = self._take()
            self._carry_out(commit, snapshots)
            del commit, snapshots  # free the memory of the payloads, because this thread may now wait for a long time

    def _take(self) -> tuple[Commit, list[Future[None]]]:
        commit, size = Commit(), 0
        while self._appends and len(commit.appends) < MAX_COMMIT_RECORDS:
            size += self._appends[0].size
            if commit.appends and size > MAX_COMMIT_BYTES:
                break
            commit.appends.append(self._appends.popleft())
            self._waiting_bytes -= commit.appends[-1].size
        commit.deleted = self._to_delete[:MAX_COMMIT_DELETIONS]
        del self._to_delete[:MAX_COMMIT_DELETIONS]
        snapshots, self._snapshots = self._snapshots, []
        if snapshots:
            commit.snapshot = max(((position, state) for position, state, _ in snapshots), key=lambda one: one[0])
        self._due = bool(self._appends or self._to_delete)
        return commit, [future for _, _, future in snapshots]

    def _carry_out(self, commit: Commit, snapshots: list[Future[None]]) -> None:
        try:
            if self._failed is not None:
                raise self._failed
            first = self._write_making_room(commit)
        except Exception as error:
            with self._changed:
                if isinstance(error, StoreError):
                    self._failed = error
                self._to_delete += commit.deleted
                self._due = bool(self._appends or self._snapshots)
            for future in [append.future for append in commit.appends] + snapshots:
                future.set_exception(error)
        else:
            for position, append in enumerate(commit.appends, start=first):
                append.future.set_result(position)
            for taken in snapshots:
                taken.set_result(None)
        for append, refusal in commit.refused:
            append.future.set_exception(refusal)

    def _write_making_room(self, commit: Commit) -> int:
        try:
            return self._write(commit)
        except UnavailableError:
            if not commit.deleted or not (commit.appends or commit.snapshot):
                raise
            # The disk is full. Commit the deletions alone, then try again.
            self._write(Commit(deleted=commit.deleted))
            commit.deleted = []
            return self._write(commit)
