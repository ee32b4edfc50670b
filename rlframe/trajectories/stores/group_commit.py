"""Group commit: one thread writes all data of a store. Appends that arrive during a commit go into the next commit."""

from __future__ import annotations

import abc
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from rlframe.errors import StoreError, UnavailableError

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
                self._due = bool(self._appends)
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
