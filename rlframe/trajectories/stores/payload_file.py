"""The file beside a SQLite database that holds its large values. Each value is written once, and its space is reused.

A SQLite table would write each value twice, page by page, which takes several times as long. Here a value is written
once, to free space, before the row with its location is committed. If a crash prevents the commit, the value lies in
free space. The space of a deleted value becomes free only after the deletion of its row is committed, so a row never
refers to another value.
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
_SPARE = 64 << 20  # free bytes kept at the end of the file, because growing costs more than overwriting

_RESERVED = 64 << 20  # bytes of the disk (at most half of it) that are reserved for records that empty the queue

_sync = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


class PayloadLocation(NamedTuple):
    """The location of a value in the file, and the CRC-32C of its bytes."""

    offset: int
    length: int
    crc: int


class PayloadFile:
    """The payload file at `path`, opened or created. This process owns it until `close`, or until the process dies.

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
        """Set the used space, as offsets and lengths in ascending order. Everything else is free."""
        self._extents = ExtentAllocator(BLOCK, locations)

    def write(self, value: bytes) -> PayloadLocation:
        """Write a value to free space. It is durable after `sync`.

        Raises:
            UnavailableError: The file would have to grow into the reserved space of the disk.
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
        """Return the free bytes for values. A long value may still not fit between two others."""
        return self._extents.free + max(0, self._size - self._extents.end) + max(0, self._growth)

    def check_room(self, length: int) -> None:
        """Raise `UnavailableError` if there is no room for values of `length` bytes."""
        if length > self.room():
            raise self._disk_full()

    @property
    def _growth(self) -> int:
        """Bytes by which the file may grow. Negative if the reserved space is in use."""
        left, reserved = self._disk()
        return left - reserved

    def _disk(self) -> tuple[int, int]:
        """Return the free bytes of the disk, and the number of bytes reserved of them."""
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
        """Free a location for other values."""
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


BLOCK = 4096  # bytes that a file system writes at once


class ExtentAllocator:
    """An allocator of space in a file. Freed extents are reused; beyond `end` the file may grow.

    Args:
        start: First byte that may be used, a multiple of `BLOCK`.
        used: Offset and length of the used extents in bytes, ascending and without overlap.

    Attributes:
        end: End of the last used extent.
        free: Free bytes before `end`.
    """

    def __init__(self, start: int, used: Iterable[tuple[int, int]] = ()) -> None:
        self.end = start
        self.free = 0
        self._size_at: dict[int, int] = {}  # size of the free extent that begins at the key
        self._start_of: dict[int, int] = {}  # start of the free extent that ends at the key
        self._by_size: list[tuple[int, int]] = []  # (size, start), sorted
        for offset, length in used:
            if offset > self.end:
                self._insert(self.end, offset - self.end)
            self.end = offset + _blocks(length)

    def take(self, length: int) -> int:
        """Return the offset of space for `length` bytes: in the smallest sufficient free extent, or at the end."""
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
        """Free an extent that `take` returned."""
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
