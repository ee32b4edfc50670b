"""A file for the large values of a SQLite database. The space of deleted values is reused.

A SQLite table would write each value twice, page by page. This takes several times as long. Here a value is written
once, to free space of the file. Then SQLite commits a row with the location of the value. If a crash prevents the
commit, the space of the value remains free. The space of a deleted value becomes free only after SQLite has committed
the deletion of the row, so a row never refers to a wrong value.
"""

from __future__ import annotations

import bisect
import fcntl
import os
import re
import secrets
from collections.abc import Iterable
from typing import NamedTuple

import crc32c

from rlframe.errors import StoreError, UnavailableError

_MAGIC = b"rlframe payloads 1\n"
_HEADER = re.compile(rb"rlframe payloads (\d+)\nid ([0-9a-f]{32})\nowner *(\d+)\n")
_SPARE = 64 << 20  # free bytes to keep at the end of the file; to extend a file is slower than to overwrite it

_RESERVED = 64 << 20  # disk bytes for commands that empty the queue, at most half of the disk

_sync = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


class PayloadLocation(NamedTuple):
    """The location and the CRC-32C checksum of a value in the file."""

    offset: int
    length: int
    crc: int


class PayloadFile:
    """Open or create the payload file at `path`. This process owns the file until `close` or the end of the process.

    Raises:
        StoreError: Another process owns the file, or it is not a payload file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._lock()
            self.created = os.fstat(self._fd).st_size == 0
            self.id = secrets.token_hex(16) if self.created else self._read_id()
            self._write_all(b"%sid %s\nowner %20d\n" % (_MAGIC, self.id.encode(), os.getpid()), 0)
        except BaseException:
            os.close(self._fd)
            raise
        self._extents = ExtentAllocator(BLOCK)
        self._size = os.fstat(self._fd).st_size

    def set_used(self, locations: Iterable[tuple[int, int]]) -> None:
        """Set which parts of the file are used: (offset, length) in ascending order. All other parts are free."""
        self._extents = ExtentAllocator(BLOCK, locations)

    def write(self, value: bytes) -> PayloadLocation:
        """Write a value to free space. The value is durable after `sync`.

        Raises:
            UnavailableError: The value would need reserved space of the disk.
        """
        offset = self._extents.take(len(value))
        try:
            growth = offset + len(value) - self._size
            if growth > 0 and growth > self._growth:
                raise self._disk_full()
            self._write_all(value, offset)
        except BaseException:
            self._extents.give_back(offset, len(value))
            os.ftruncate(self._fd, self._size)  # remove a partly written value
            raise
        self._size = max(self._size, offset + len(value))
        return PayloadLocation(offset, len(value), crc32c.crc32c(value))

    def room(self) -> int:
        """Return the free bytes for values. They may be divided into parts that are too small for a long value."""
        return self._extents.free + max(0, self._size - self._extents.end) + max(0, self._growth)

    def check_room(self, length: int) -> None:
        """Raise `UnavailableError` if the file has no room for values of `length` bytes."""
        if length > self.room():
            raise self._disk_full()

    @property
    def _growth(self) -> int:
        """Bytes by which the file may grow. Negative if a part of the reserved space is already used."""
        left, reserved = self._disk()
        return left - reserved

    def _disk(self) -> tuple[int, int]:
        """Return (free bytes of the disk, bytes that are reserved)."""
        disk = os.fstatvfs(self._fd)
        return disk.f_bavail * disk.f_frsize, min(_RESERVED, disk.f_blocks * disk.f_frsize // 2)

    def _disk_full(self) -> UnavailableError:
        left, reserved = self._disk()
        return UnavailableError(
            f"The disk of {self.path} has {left >> 20} MB left, and {reserved >> 20} MB are reserved for emptying the "
            "queue. Trainers must take some groups first, or you must free space on the disk."
        )

    def read(self, location: PayloadLocation) -> bytes | None:
        """Return the value at a location, or None if its checksum does not match."""
        value = os.pread(self._fd, location.length, location.offset)
        return value if len(value) == location.length and crc32c.crc32c(value) == location.crc else None

    def give_back(self, location: PayloadLocation) -> None:
        """Free the space of a value."""
        self._extents.give_back(location.offset, location.length)
        if self._size > self._extents.end + _SPARE:
            os.ftruncate(self._fd, self._extents.end)
            self._size = self._extents.end

    def sync(self) -> None:
        """Flush all writes to the device."""
        _sync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write_all(self, value: bytes, offset: int) -> None:
        view = memoryview(value)
        while view:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases the lock when the process dies
        except BlockingIOError:
            header = _HEADER.match(os.pread(self._fd, BLOCK, 0))
            owner = f"process {int(header[3])}" if header else "another process"
            if header and int(header[3]) == os.getpid():
                owner = f"this process ({os.getpid()}), which opened it before"
            raise StoreError(
                f"{self.path} is in use by {owner}. Only one process at a time can open a SQLite store; "
                "several service processes can share a Redis server: --store redis://HOST:PORT."
            ) from None

    def _read_id(self) -> str:
        header = _HEADER.match(os.pread(self._fd, BLOCK, 0))
        if header is None:
            raise StoreError(f"{self.path} should hold the payloads of a trajectory store, but is something else.")
        if header[1] != b"1":
            raise StoreError(f"{self.path} has format {int(header[1])}; this version of rlframe reads format 1.")
        return header[2].decode()


BLOCK = 4096  # bytes in one block of a file system


class ExtentAllocator:
    """An allocator of space in a file. It reuses free extents before it makes the file longer.

    Args:
        start: First byte that may be used, a multiple of `BLOCK`.
        used: Offset and length of the used extents in bytes, ascending and without overlap.

    Attributes:
        end: Position after the last used extent.
        free: Number of free bytes before `end`.
    """

    def __init__(self, start: int, used: Iterable[tuple[int, int]] = ()) -> None:
        self.end = start
        self.free = 0
        self._size_at: dict[int, int] = {}  # size of the free extent that begins at the key
        self._start_of: dict[int, int] = {}  # start of the free extent that ends at the key
        self._by_size: list[tuple[int, int]] = []  # (size, start) of the free extents, sorted
        for offset, length in used:
            if offset > self.end:
                self._insert(self.end, offset - self.end)
            self.end = offset + _blocks(length)

    def take(self, length: int) -> int:
        """Allocate `length` bytes in the smallest sufficient free extent, or at the end. Return the offset."""
        size = _blocks(length)
        index = bisect.bisect_left(self._by_size, (size, 0))
        if index == len(self._by_size):
            self.end += size
            return self.end - size
        found, offset = self._by_size[index]
        self._remove(offset)
        if found > size:
            self._insert(offset + size, found - size)
        return offset

    def give_back(self, offset: int, length: int) -> None:
        """Free an extent that `take` has allocated."""
        size = _blocks(length)
        if offset in self._start_of:
            before = self._start_of[offset]
            size += self._remove(before)
            offset = before
        if offset + size in self._size_at:
            size += self._remove(offset + size)
        if offset + size == self.end:
            self.end = offset
        else:
            self._insert(offset, size)

    def _insert(self, offset: int, size: int) -> None:
        self.free += size
        self._size_at[offset] = size
        self._start_of[offset + size] = offset
        bisect.insort(self._by_size, (size, offset))

    def _remove(self, offset: int) -> int:
        size = self._size_at.pop(offset)
        self.free -= size
        del self._start_of[offset + size]
        del self._by_size[bisect.bisect_left(self._by_size, (size, offset))]
        return size


def _blocks(length: int) -> int:
    return max(1, -(-length // BLOCK)) * BLOCK
