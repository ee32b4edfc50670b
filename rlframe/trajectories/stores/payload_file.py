"""The file beside a SQLite database that holds its large values: written once, read, and its space used again.

In a SQLite table, each of them would be written twice, page by page, and take several times as long. Here a value is
written once, at a free place, before the row that names the place is committed. What a crash leaves of one whose row
was not committed lies in free space. A place is free again only after the deletion of its row was committed, so no row
ever names a place that another value was written to.
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
_SPARE = 64 << 20  # bytes of free space at its end that the file keeps: growing costs more than overwriting

_RESERVED = 64 << 20  # bytes of its disk, or half of a smaller one, that it leaves to what empties the queue

_sync = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


class PayloadLocation(NamedTuple):
    """Where a value lies, and the CRC-32C of its bytes."""

    offset: int
    length: int
    crc: int


class PayloadFile:
    """Opens the file at `path`, or creates it, and owns it until `close`, or until this process dies.

    Raises:
        StoreError: another process owns it, or it is something else.
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

    def set_used(self, places: Iterable[tuple[int, int]]) -> None:
        """Say what is in use, as offsets and lengths, ascending; everything else is free."""
        self._extents = ExtentAllocator(BLOCK, places)

    def write(self, value: bytes) -> PayloadLocation:
        """Write a value where there is room. It is durable after `sync`.

        Raises:
            UnavailableError: the file would have to grow into what is kept free of its disk.
        """
        offset = self._extents.take(len(value))
        try:
            growth = offset + len(value) - self._size
            if growth > 0 and growth > self._growth:
                raise self._disk_full()
            self._write_all(value, offset)
        except BaseException:
            self._extents.give_back(offset, len(value))
            os.ftruncate(self._fd, self._size)  # where the disk took a part
            raise
        self._size = max(self._size, offset + len(value))
        return PayloadLocation(offset, len(value), crc32c.crc32c(value))

    def room(self) -> int:
        """Bytes of values that it can take. A long one may find no place among the values that were given back."""
        return self._extents.free + max(0, self._size - self._extents.end) + max(0, self._growth)

    def check_room(self, length: int) -> None:
        """Raise `UnavailableError` where there is no room for values of so many bytes."""
        if length > self.room():
            raise self._disk_full()

    @property
    def _growth(self) -> int:
        """Bytes by which it may grow, less than 0 where others have taken what is kept free."""
        left, reserved = self._disk()
        return left - reserved

    def _disk(self) -> tuple[int, int]:
        """Bytes that its disk has left, and that are kept of them."""
        disk = os.fstatvfs(self._fd)
        return disk.f_bavail * disk.f_frsize, min(_RESERVED, disk.f_blocks * disk.f_frsize // 2)

    def _disk_full(self) -> UnavailableError:
        left, reserved = self._disk()
        return UnavailableError(
            f"The disk of {self.path} has {left >> 20} MB left, and {reserved >> 20} MB are kept for what empties the "
            "queue. Trainers have to take some groups first; or make room on the disk."
        )

    def read(self, place: PayloadLocation) -> bytes | None:
        """The value at a place; None if it is not what was written there."""
        value = os.pread(self._fd, place.length, place.offset)
        return value if len(value) == place.length and crc32c.crc32c(value) == place.crc else None

    def give_back(self, place: PayloadLocation) -> None:
        """Let other values be written to a place."""
        self._extents.give_back(place.offset, place.length)
        if self._size > self._extents.end + _SPARE:
            os.ftruncate(self._fd, self._extents.end)
            self._size = self._extents.end

    def sync(self) -> None:
        """Have the device write everything down."""
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
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go of it when the process dies
        except BlockingIOError:
            header = _HEADER.match(os.pread(self._fd, BLOCK, 0))
            owner = f"process {int(header[3])}" if header else "another process"
            if header and int(header[3]) == os.getpid():
                owner = f"this process ({os.getpid()}), which opened it before"
            raise StoreError(
                f"{self.path} is in use by {owner}. One process at a time may have a SQLite store; "
                "several service processes can share a Redis: --store redis://HOST:PORT."
            ) from None

    def _read_id(self) -> str:
        header = _HEADER.match(os.pread(self._fd, BLOCK, 0))
        if header is None:
            raise StoreError(f"{self.path} should hold the payloads of a trajectory store, but is something else.")
        if header[1] != b"1":
            raise StoreError(f"{self.path} has format {int(header[1])}; this version of rlframe reads format 1.")
        return header[2].decode()


BLOCK = 4096  # bytes: what a file system writes at least


class ExtentAllocator:
    """The free parts of a file between `start` and `end`, `free` bytes together. Nothing is free behind `end`: the file
    may grow there.

    Args:
        start: the first byte that may be used, a multiple of `BLOCK`.
        used: offset and length, in bytes, of what is in use, ascending; parts do not overlap.
    """

    def __init__(self, start: int, used: Iterable[tuple[int, int]] = ()) -> None:
        self.end = start
        self.free = 0
        self._size_at: dict[int, int] = {}  # of the free part that begins there
        self._start_of: dict[int, int] = {}  # of the free part that ends there
        self._by_size: list[tuple[int, int]] = []  # (size, start), sorted
        for offset, length in used:
            if offset > self.end:
                self._insert(self.end, offset - self.end)
            self.end = offset + _blocks(length)

    def take(self, length: int) -> int:
        """The offset of room for `length` bytes: the smallest free part that suffices, or the end of the file."""
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
        """Make what `take` gave free again."""
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
