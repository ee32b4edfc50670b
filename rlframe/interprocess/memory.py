"""Arrays in memory that processes of one machine share: laid out, found, locked, and read while others write.

The memory has no name in any file system, so nothing of it can be left behind: it goes when the process that created it
has let go of it, or has died, and nobody maps it any more. Pages that nobody writes to take no room.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import secrets
import struct
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from rlframe.interprocess.processes import ProcessId, this_process
from rlframe.interprocess.waiting import HAS_FUTEX, NEEDS_FENCE, fence

_RETRY_INTERVAL = 0.002  # seconds between two tries

# A variable of who may share memory with those alone that have the same: Ray nodes, which may be on one machine today.
MACHINE = "RLFRAME_MACHINE"

SUPPORTED = hasattr(os, "memfd_create") and HAS_FUTEX

_TOKEN, _CLOSED = 0, 1  # words at the start of the memory: which it is; 1 once its creator has closed it
_CACHE_LINE = 64  # bytes of a cache line

Fields = Mapping[str, tuple[tuple[int, ...], np.dtype]]  # an array's name -> its shape and dtype


class MemoryName(NamedTuple):
    """Where the memory is found, by any process of the same user on the same machine."""

    creator: ProcessId
    descriptor: int
    token: int
    machine: str  # see `MACHINE`


class SharedArrays:
    """Named arrays in a block of shared memory, mapped into this process.

    `create` makes the memory, and `attach` finds it by its `name`. This constructor takes a descriptor that a process
    created (`anonymous_file`) and its children inherited; it stays the caller's to close.

    Args:
        descriptor: of the memory, which is made as large as it must be.
        fields: the arrays, in the order in which they lie; every process must say the same.

    Attributes:
        arrays: by name; zeros at first.
        name: for `attach`; None of memory that is inherited.
    """

    name: MemoryName | None = None
    _finalizer: weakref.finalize | None = None

    def __init__(self, descriptor: int, fields: Fields) -> None:
        self._descriptor = descriptor
        offsets, size = _lay_out(fields)
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        mapped = mmap.mmap(descriptor, size)
        self._words = memoryview(mapped)[:_CACHE_LINE].cast("q")
        # Not `frombuffer` and `reshape`: views of that refer to an array that is not the one in here, so its reference
        # count would not tell of them.
        self.arrays: dict[str, np.ndarray] = {
            name: np.ndarray(*fields[name], mapped, place) for name, place in offsets.items()
        }

    @classmethod
    def create(cls, label: str, fields: Fields) -> SharedArrays:
        """Make the memory. The system's tools list it as `label`. It is closed when nobody refers to the object."""
        descriptor = anonymous_file(label)
        created = cls(descriptor, fields)
        created._words[_TOKEN] = secrets.randbits(62)
        created.name = MemoryName(this_process(), descriptor, created._words[_TOKEN], os.environ.get(MACHINE, ""))
        created._finalizer = weakref.finalize(created, _close, created.name, created._words)
        return created

    @classmethod
    def attach(cls, name: MemoryName, label: str, fields: Fields) -> SharedArrays:
        """Find memory that this process or another has created.

        Raises:
            PermissionError: its creator runs as another user, or on another Ray node.
            FileNotFoundError: it is closed, or holds other fields, or its creator has ended or is on another machine.
        """
        path = f"/proc/{name.creator.pid}/fd/{name.descriptor}"
        if name.machine != os.environ.get(MACHINE, ""):
            raise PermissionError("it is memory of another Ray node, be that on this machine")
        if not os.readlink(path).startswith(f"/memfd:{label}"):
            raise FileNotFoundError(path)  # closed, and its number taken by another file
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if not name.creator.is_alive or os.fstat(descriptor).st_size != _lay_out(fields)[1]:
                raise FileNotFoundError(path)
            attached = cls(descriptor, fields)
            if attached._words[_TOKEN] != name.token:
                raise FileNotFoundError(path)
        except BaseException:
            os.close(descriptor)
            raise
        attached.name = name
        attached._finalizer = weakref.finalize(attached, os.close, descriptor)
        return attached

    def rows(self, name: str) -> list[memoryview]:
        """Return the rows of an array of int64, as what its scalars are read and written by in a third of the time."""
        array = self.arrays[name]
        return [memoryview(row) for row in array.reshape(-1, array.shape[-1])]

    @property
    def closed(self) -> bool:
        """Whether its creator has closed it. One that died has not."""
        return self._words[_CLOSED] == 1

    @property
    def creator_is_alive(self) -> bool:
        """Whether the process that created it runs on."""
        return self.name is None or self.name.creator.is_alive

    def close(self) -> None:
        """Release the memory. If this process created it, it is closed for all processes. May be called again."""
        if self._finalizer is not None:
            self._finalizer()

    @contextlib.contextmanager
    def lock(self, timeout: float, timeout_error: Exception) -> Iterator[None]:
        """Hold the lock of this memory, which one `SharedArrays` of it has at a time. The end of a process frees it.

        Args:
            timeout: seconds to wait for it.
            overdue: the error to raise if another process has had it for so long.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise timeout_error from None
                time.sleep(_RETRY_INTERVAL)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def anonymous_file(label: str) -> int:
    """Return a descriptor of an empty file that has no name, for processes that inherit it."""
    return os.memfd_create(label, os.MFD_CLOEXEC)


def _close(name: MemoryName, words: memoryview) -> None:
    if this_process() == name.creator:  # and not a fork of it
        words[_CLOSED] = 1
        os.close(name.descriptor)


def _lay_out(fields: Fields) -> tuple[dict[str, int], int]:
    """(offset of each array, bytes in all): no two arrays share a cache line, nor two large ones a page."""
    offsets, end = {}, _CACHE_LINE
    for name, (shape, dtype) in fields.items():
        size = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        unit = mmap.PAGESIZE if size >= mmap.PAGESIZE else _CACHE_LINE
        offsets[name] = -(-end // unit) * unit
        end = offsets[name] + size
    return offsets, end


class Seqlock:
    """A few numbers that one process writes at once: who reads gets all of them as they were at one time.

    There are two copies, and the lower bit of a count says which is whole. So nobody waits, and a writer that dies in
    between has changed nothing. Only one thread may write at a time.

    Numbers that say what lies elsewhere (in a slot of large arrays, say) guard it too. Who writes there writes numbers
    that mean "nothing" before and the new ones afterwards; who reads compares `count` before and after.

    Args:
        words: contiguous int64 in shared memory, zeros at first; `Seqlock.words(n)` of them, for n numbers.
    """

    def __init__(self, words: memoryview) -> None:
        self._words, size = words, len(words) // 2
        copy = struct.Struct(f"@{size}q")
        self._pack, self._unpack = copy.pack_into, copy.unpack_from
        self._offsets = 8, 8 + 8 * size  # of the copies

    @staticmethod
    def words(numbers: int) -> int:
        """Return how many words it takes."""
        return 1 + 2 * numbers

    @property
    def count(self) -> int:
        """How often it was written."""
        return self._words[0]

    def write(self, *numbers: int) -> None:
        """Make `numbers` known, and all that was written to the memory before."""
        words = self._words
        count = words[0] + 1
        self._pack(words, self._offsets[count & 1], *numbers)
        if NEEDS_FENCE:
            fence()
        words[0] = count
        if NEEDS_FENCE:
            fence()

    def read(self) -> tuple[int, ...]:
        """Return the numbers of the last `write`."""
        words = self._words
        while True:  # again only where it was written twice meanwhile
            count = words[0]
            if NEEDS_FENCE:
                fence()
            numbers = self._unpack(words, self._offsets[count & 1])
            if NEEDS_FENCE:
                fence()
            if words[0] == count:
                return numbers
