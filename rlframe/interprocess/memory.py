"""Arrays in memory that the processes of one machine share, with a lock and a sequence lock (`Seqlock`).

The memory is an anonymous file, so a crash leaves no file behind. The kernel frees the memory when its creator has
closed it or died, and no process maps it. Pages that were never written use no memory.

The end of the file has settings of a process's own memory: glibc's malloc for a learner, and Python's garbage
collector. docs/project/speed.md has the measurements of malloc.

`use_one_arena`: By default, glibc splits the memory of a process into arenas, up to 8 per core. An arena keeps the
memory that its threads freed, and threads of other arenas cannot use this memory. Orbax starts about 19 threads for
each checkpoint, and each thread gets any free arena. So, with time, every arena grows to the size that the largest
thread needs.

`keep_freed_memory`: An update of a convolutional network allocates and frees hundreds of MB. By default, glibc returns
this memory to the kernel, and the next update causes a page fault for each page. These page faults took a third of the
CPU time of PPO on Pong.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
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

_RETRY_INTERVAL = 0.002  # seconds between two attempts to take the lock

# Environment variable. Only processes with the same value share memory. It keeps two Ray nodes on one machine apart.
MACHINE = "RLFRAME_MACHINE"

SUPPORTED = hasattr(os, "memfd_create") and HAS_FUTEX

# The first two words of the memory: a random identifier at index _TOKEN, and at index _CLOSED a 1 after the creator has
# closed the memory.
_TOKEN, _CLOSED = 0, 1
_CACHE_LINE = 64  # bytes

Fields = Mapping[str, tuple[tuple[int, ...], np.dtype]]  # array name -> (shape, dtype)


class MemoryName(NamedTuple):
    """The address of shared memory. Any process of the same user on the same machine can open it."""

    creator: ProcessId
    descriptor: int
    token: int
    machine: str  # value of the variable `MACHINE`


class SharedArrays:
    """Named arrays in shared memory, mapped into this process.

    `create` makes new memory, and `attach` opens existing memory by its `name`. The constructor is for memory that
    child processes inherit: its descriptor comes from `anonymous_file`, and the caller closes it.

    Args:
        descriptor: the memory's descriptor. If the memory is too small for the arrays, it is enlarged.
        fields: shape and dtype of each array, in memory order. Every process must pass the same fields.

    Attributes:
        arrays: the arrays by name, initially zero.
        name: the address to pass to `attach`. Inherited memory has no address.
    """

    name: MemoryName
    _finalizer: weakref.finalize | None = None

    def __init__(self, descriptor: int, fields: Fields) -> None:
        self._descriptor = descriptor
        offsets, size = _lay_out(fields)
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        mapped = mmap.mmap(descriptor, size)
        self._words = memoryview(mapped)[:_CACHE_LINE].cast("q")
        # Do not use `frombuffer` and `reshape`. A view would then keep a hidden base array alive, not the array in this
        # dict, and reference counts of the arrays in this dict would be too low.
        self.arrays: dict[str, np.ndarray] = {
            name: np.ndarray(*fields[name], mapped, place) for name, place in offsets.items()
        }

    @classmethod
    def create(cls, label: str, fields: Fields) -> SharedArrays:
        """Create memory, which system tools list as `label`.

        The memory is closed when the returned object is garbage-collected.
        """
        descriptor = anonymous_file(label)
        created = cls(descriptor, fields)
        created._words[_TOKEN] = secrets.randbits(62)
        created.name = MemoryName(this_process(), descriptor, created._words[_TOKEN], os.environ.get(MACHINE, ""))
        created._finalizer = weakref.finalize(created, _close, created.name, created._words)
        return created

    @classmethod
    def attach(cls, name: MemoryName, label: str, fields: Fields) -> SharedArrays:
        """Open memory that `create` made in this or another process.

        Raises:
            PermissionError: the creator runs as another user, or on another Ray node.
            FileNotFoundError: the memory is closed, or its size does not match `fields`. Or its creator has exited, or
                runs on another machine.
        """
        path = f"/proc/{name.creator.pid}/fd/{name.descriptor}"
        if name.machine != os.environ.get(MACHINE, ""):
            raise PermissionError("it belongs to another Ray node, which may be on this machine")
        if not os.readlink(path).startswith(f"/memfd:{label}"):
            raise FileNotFoundError(path)  # the memory is closed, and its descriptor number now belongs to another file
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
        """Return the rows of an int64 array as memoryviews. Reading a number from them is 3 times faster than numpy."""
        array = self.arrays[name]
        return [memoryview(row) for row in array.reshape(-1, array.shape[-1])]

    @property
    def closed(self) -> bool:
        """True if the creator has closed the memory. False if the creator died before it closed the memory."""
        return self._words[_CLOSED] == 1

    @property
    def creator_is_alive(self) -> bool:
        """True if the process that created the memory is still running. Not for inherited memory."""
        return self.name.creator.is_alive

    def close(self) -> None:
        """Release the memory. In the creator's process, mark it as closed for all processes. Later calls do nothing."""
        if self._finalizer is not None:
            self._finalizer()

    @contextlib.contextmanager
    def lock(self, timeout: float, timeout_error: Exception) -> Iterator[None]:
        """Hold this memory's lock. In all processes together, only one `SharedArrays` object can hold it at a time.

        If the process that holds the lock exits, the kernel releases the lock.

        Args:
            timeout: seconds to wait for the lock.
            timeout_error: the error to raise after the timeout.
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
    """Return the descriptor of a new empty file without a name. Child processes can inherit the descriptor."""
    return os.memfd_create(label, os.MFD_CLOEXEC)


def _close(name: MemoryName, words: memoryview) -> None:
    if this_process() == name.creator:  # a forked child must not close the memory
        words[_CLOSED] = 1
        os.close(name.descriptor)


def _lay_out(fields: Fields) -> tuple[dict[str, int], int]:
    """Return each array's offset, and the total size in bytes.

    No two arrays share a cache line, and no two large arrays share a page.
    """
    offsets, end = {}, _CACHE_LINE
    for name, (shape, dtype) in fields.items():
        size = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        unit = mmap.PAGESIZE if size >= mmap.PAGESIZE else _CACHE_LINE
        offsets[name] = -(-end // unit) * unit
        end = offsets[name] + size
    return offsets, end


class Seqlock:
    """A sequence lock: a reader never gets a mix of the numbers of two writes.

    The memory contains two copies of the numbers. `count`, the number of writes, is even or odd, which selects the copy
    that is complete. So readers do not wait for the writer, and a writer that dies during a write changes nothing. Only
    one thread may write at a time.

    A sequence lock can also protect other data, such as a slot of large arrays. The writer first writes numbers that
    mark the slot as empty, then the data, then the new numbers. A reader reads `count` before and after the data. The
    data is valid if both values are equal.

    Args:
        words: contiguous int64 words in shared memory, initially zero. n numbers need `Seqlock.words(n)` words.
    """

    def __init__(self, words: memoryview) -> None:
        self._words, size = words, len(words) // 2
        copy = struct.Struct(f"@{size}q")
        self._pack, self._unpack = copy.pack_into, copy.unpack_from
        self._offsets = 8, 8 + 8 * size  # offsets of the two copies in bytes

    @staticmethod
    def words(numbers: int) -> int:
        """Return the number of words that a `Seqlock` of `numbers` numbers needs."""
        return 1 + 2 * numbers

    @property
    def count(self) -> int:
        """Number of writes so far."""
        return self._words[0]

    def write(self, *numbers: int) -> None:
        """Write `numbers`. A reader that gets these numbers also sees all data that was written to memory earlier."""
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
        while True:  # the loop repeats only if the numbers were written twice during the read
            count = words[0]
            if NEEDS_FENCE:
                fence()
            numbers = self._unpack(words, self._offsets[count & 1])
            if NEEDS_FENCE:
                fence()
            if words[0] == count:
                return numbers


# constants from <malloc.h>, which mallopt(3) describes
_M_ARENA_MAX, _M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -8, -1, -2, -4
_NEVER, _GROWTH = -1, 64 << 20  # bytes
_KEEP_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")


@functools.cache
def use_one_arena() -> bool:
    """Limit malloc to one arena for all threads of this process.

    Call this function at the start of a process. Later, a second thread may have created another arena, which stays.
    JAX's threads start with the first computation, not with `import jax`.

    Returns:
        True if the limit is set. False if an environment variable sets the number of arenas, or if the C library is not
        glibc.
    """
    if "MALLOC_ARENA_MAX" in os.environ or "glibc.malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    return _mallopt((_M_ARENA_MAX, 1))


@functools.cache
def keep_freed_memory() -> bool:
    """Make malloc keep the memory that this process frees from now on.

    Returns:
        True if malloc's options are set. False if updates run on an accelerator, if an environment variable sets one of
        these options (such as `MALLOC_TRIM_THRESHOLD_`), or if the C library is not glibc.
    """
    import jax

    if jax.default_backend() != "cpu" or any(name in os.environ for name in _KEEP_VARIABLES):
        return False
    return _mallopt((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, _GROWTH))


def _mallopt(*options: tuple[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    done = [mallopt(option, value) for option, value in options]
    return all(done)


@contextlib.contextmanager
def rare_garbage_collections() -> Iterator[None]:
    """Make garbage collections rarer in a process of a run, and skip them at its exit.

    Imports and compilations create few cycles but many objects, and after each collection, JAX runs an additional one.
    This saves 5 % of the processor time of a short run, and half a second at its exit.
    """
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 50)
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        gc.set_threshold(*before)
