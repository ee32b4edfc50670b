"""A durable store in two files: a SQLite database (log, snapshot, and locations of payloads) and a payload file.

Payloads in a column of the database would be written twice, to the journal and to the database.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence

import crc32c

from rlframe.errors import StoreError, UnavailableError, UsageError
from rlframe.trajectories.stores.base import Commit, GroupCommitStore, check_range
from rlframe.trajectories.stores.payload_file import PayloadFile, PayloadLocation

_APPLICATION_ID = 0x726C7472  # the ASCII characters "rltr", in the database's header
_FORMAT = 2
_DROPPED_AT_ONCE = 5000  # maximum records that one commit deletes, which takes a few milliseconds

_SCHEMA = f"""
BEGIN;
CREATE TABLE log (position INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE payloads (position INTEGER PRIMARY KEY, "offset" INTEGER, length INTEGER, crc INTEGER);
CREATE TABLE snapshot (position INTEGER PRIMARY KEY, crc INTEGER, state BLOB);
CREATE TABLE payload_file (id TEXT);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_FORMAT};
"""

_log = logging.getLogger(__name__)


class SQLiteStore(GroupCommitStore):
    """A `Store` for one service process. Acknowledged data survives a kill -9 of the process.

    Args:
        path: The database, which is created if missing. The payloads are in `path` + "-payloads".
        sync: Whether an append is acknowledged only after the disk has written the data, so that it survives a power
            failure. Otherwise the operating system writes the data within about half a minute. A power failure may then
            lose the last records of the log. A payload that was not written is read as None, never as wrong data.

    Raises:
        UsageError: The path cannot be a store.
        StoreError: Another process has opened the store. Or the store belongs to another program, has another format,
            or is damaged.
    """

    shared = False

    def __init__(self, path: str | os.PathLike[str], *, sync: bool) -> None:
        self.durability = (
            "Acknowledged data survives a crash of this process and a power failure."
            if sync
            else "Acknowledged data survives a crash of this process, but not a power failure."
        )
        self._sync = sync
        self._path = os.fspath(path)
        self._name = f"The trajectory store {self._path}"
        self._lock = threading.Lock()  # guards `_deleting` and the free space of `_file`
        self._reading = threading.Lock()
        with contextlib.ExitStack() as undo, self._opening():
            self._file = PayloadFile(self._path + "-payloads")
            undo.callback(self._file.close)
            with contextlib.ExitStack() as new:
                if self._file.created:
                    new.callback(os.unlink, self._file.path)
                self._writer = self._connect()
                undo.callback(self._writer.close)
                self._prepare()
                new.pop_all()
            self._reader = self._connect()
            self._recover()
            undo.pop_all()
        super().__init__(self._name)

    def room(self) -> int:
        return self._file.room()

    def check_room(self, size: int) -> None:
        self._file.check_room(size)

    def read(self, after: int, limit: int = 1000) -> list[tuple[int, bytes]]:
        last = self._last  # read before the query, so that the query finds at least these records
        with self._reading:
            found = self._reader.execute(
                "SELECT position, record FROM log WHERE position > ? ORDER BY position LIMIT ?", (after, limit)
            ).fetchall()
        check_range(after, found[0][0] if found else None, last, self._name)
        return found

    def payloads(self, positions: Sequence[int]) -> list[bytes | None]:
        found = self._locations(positions)
        return [self._payload(position, found.get(position)) for position in positions]

    def delete_payloads(self, positions: Iterable[int]) -> None:
        with self._lock:
            dropped = [position for position in positions if position not in self._deleting]
            self._deleting.update(dropped)
        if dropped:
            super().delete_payloads(dropped)

    def payload_positions(self) -> list[int]:
        with self._lock:
            deleted = set(self._deleting)  # read before the query, which may still find rows that are being deleted
        with self._reading:
            rows = self._reader.execute("SELECT position FROM payloads ORDER BY position").fetchall()
        return [position for (position,) in rows if position not in deleted]

    def load(self) -> tuple[int, bytes] | None:
        with self._reading:
            found = self._reader.execute("SELECT position, crc, state FROM snapshot").fetchone()
        if found is None:
            return None
        position, crc, state = found
        if crc32c.crc32c(state) != crc:
            raise StoreError(f"{self._name} is damaged: the checksum of its snapshot does not match.")
        return position, state

    def close(self) -> None:
        super().close()
        with self._reading:
            self._reader.close()
        self._writer.close()  # closed last: SQLite then removes its write-ahead log
        self._file.close()

    def _locations(self, positions: Sequence[int]) -> dict[int, PayloadLocation]:
        """Return the locations of these payloads from the database. There may be too many locations for a cache."""
        with self._reading:
            return _find_locations(self._reader, [position for position in positions if position not in self._deleting])

    def _payload(self, position: int, location: PayloadLocation | None) -> bytes | None:
        value = self._file.read(location) if location else None
        # If the payload has just been deleted, its location may have another value. Then nothing is damaged.
        if location and value is None and self._locations([position]).get(position) == location:
            _log.error("%s: the payload at position %d is damaged.", self._name, position)
        return value

    # Opening

    @contextlib.contextmanager
    def _opening(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if error.args and "not a database" in error.args[0]:
                raise StoreError(f"{self._path} is not a SQLite database. Name a new file, or none.") from error
            raise StoreError(f"{self._name} cannot be opened: {error}.") from error
        except OSError as error:
            reason = "its directory does not exist" if error.errno == errno.ENOENT else error.strerror
            raise UsageError(f"{self._name} cannot be opened: {reason}. Name a file that can be written.") from error

    def _connect(self) -> sqlite3.Connection:
        if os.path.isdir(self._path):
            raise UsageError(f"{self._path} is a directory. Name a file in it, such as {self._path}/trajectories.db.")
        return sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=5.0)

    def _prepare(self) -> None:
        """Create the tables, or check that the existing tables belong to a trajectory store."""
        one = self._writer.execute
        if one("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            self._writer.executescript(_SCHEMA)
            one("INSERT INTO payload_file VALUES (?)", (self._file.id,))
            self._file.sync()
            one("COMMIT")
        if one("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
            raise StoreError(f"{self._path} is the database of another program. Name a new file.")
        if (version := one("PRAGMA user_version").fetchone()[0]) != _FORMAT:
            raise StoreError(f"{self._path} has format {version}; this version of rlframe reads format {_FORMAT}.")
        if one("SELECT id FROM payload_file").fetchone()[0] != self._file.id:
            wrong = "is missing" if self._file.created else f"does not belong to {self._path}"
            raise StoreError(f"{self._file.path} {wrong}. Move or copy the two files together.")
        one("PRAGMA journal_mode = WAL")
        one(f"PRAGMA synchronous = {'FULL' if self._sync else 'NORMAL'}")

    def _recover(self) -> None:
        """Read the used space of the payload file and the last position of the log from the database."""
        self._deleting: set[int] = set()  # positions of payloads whose rows are not yet deleted
        self._file.set_used(self._writer.execute('SELECT "offset", length FROM payloads ORDER BY 1'))
        newest = "SELECT max(position) FROM (SELECT position FROM log UNION ALL SELECT position FROM snapshot)"
        self._last = self._writer.execute(newest).fetchone()[0] or 0

    # Writing, in the thread of `GroupCommitStore`

    def _write(self, commit: Commit) -> int:
        first = self._last + 1
        new: dict[int, PayloadLocation] = {}
        try:
            position = first
            for append in tuple(commit.appends):
                try:
                    location = None if append.payload is None else self._file.write(append.payload)
                except UnavailableError as error:  # the disk is full, but appends without a payload still fit
                    commit.refuse(append, error)
                    continue
                if location is not None:
                    new[position] = location
                position += 1
            if new and self._sync:
                self._file.sync()
            old = _find_locations(self._writer, commit.deleted)
            self._writer.execute("BEGIN IMMEDIATE")
            with self._writer:  # commits, or rolls back after an error
                self._commit(enumerate((append.record for append in commit.appends), start=first), new, commit)
        except Exception as error:
            for location in new.values():
                self._file.give_back(location)
            raise self._describe(error) from error
        with self._lock:
            self._deleting.difference_update(commit.deleted)
            self._last += len(commit.appends)
            for location in old.values():
                self._file.give_back(location)
        return first

    def _commit(self, records: Iterable[tuple[int, bytes]], new: dict[int, PayloadLocation], commit: Commit) -> None:
        one, many = self._writer.execute, self._writer.executemany
        many("INSERT INTO log VALUES (?, ?)", records)
        many("INSERT INTO payloads VALUES (?, ?, ?, ?)", [(at, *location) for at, location in new.items()])
        many("DELETE FROM payloads WHERE position = ?", [(position,) for position in commit.deleted])
        if commit.snapshot:
            position, state = commit.snapshot
            one("INSERT OR IGNORE INTO snapshot VALUES (?, ?, ?)", (position, crc32c.crc32c(state), state))
            one("DELETE FROM snapshot WHERE position < (SELECT max(position) FROM snapshot)")
        one(
            "DELETE FROM log WHERE position IN "
            "(SELECT position FROM log WHERE position <= (SELECT max(position) FROM snapshot) LIMIT ?)",
            (_DROPPED_AT_ONCE,),
        )

    def _describe(self, error: Exception) -> Exception:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if full or (isinstance(error, sqlite3.OperationalError) and "full" in str(error)):
            return UnavailableError(f"{self._name} cannot grow: {error}. Make room on its disk.")
        return StoreError(f"{self._name} failed, and accepts nothing more: {error}. Restart the service.")


def _find_locations(database: sqlite3.Connection, positions: Sequence[int]) -> dict[int, PayloadLocation]:
    """Return the locations of the payloads at these positions."""
    query = "SELECT * FROM payloads WHERE position IN (SELECT value FROM json_each(?))"  # takes 0.5 us per position
    return {row[0]: PayloadLocation(*row[1:]) for row in database.execute(query, (json.dumps(list(positions)),))}
