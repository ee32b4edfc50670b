"""Store the newest version of the parameters in the learner's process, and share it with processes of the machine.

`LocalParams` stores a version in one process. Its subclass `Publication` also writes versions to shared memory, where a
`PublicationReader` in another process reads them. A version that no process reads is never copied.

How version 7 gets from a `Publication` to a reader that has version 6:

1. `Publication.publish(7, packed)` writes the number 7 to shared memory, but not the arrays of version 7.
2. The reader sees that version 7 is announced, and wakes the publication's thread through the futex `requested`.
3. The thread copies the arrays into the slot that does not have version 6. During the copy, the slot's version is -1.
4. The thread sets the slot's version to 7, and wakes the readers through the futex `changed`.
5. The reader copies the arrays. If the slot's version changed during the copy, the reader starts again with the newest
   slot.
6. The reader records that version 7 was read. For this reason, `publish(8, packed)` wakes the thread at once, before
   any reader requests version 8.
"""

from __future__ import annotations

import functools
import pickle
import threading
import time
from typing import Any

import numpy as np

from rlframe.errors import UnavailableError, UsageError
from rlframe.interprocess.memory import SUPPORTED, Fields, MemoryName, Seqlock, SharedArrays
from rlframe.interprocess.waiting import Futex, fence
from rlframe.params.packing import PackedParams, Packing
from rlframe.types import Tree

LONGEST_WAIT = 1.0  # maximum seconds of one `wait_for_version` call; the program cannot stop during a call

_LABEL = "rlframe-params"
_SLOTS = 2  # two slots, so that writing a version does not overwrite the newest version
_ROW_WORDS = 8  # int64 words reserved for a number or a lock, so that each fills one cache line
_READ_TIMEOUT = 1.0  # maximum seconds that a reader waits until an announced version is written
# A reader wakes the writer thread again after this number of seconds, because a wake-up can be lost if two processes
# wake the thread at the same time.
_WAKE_AGAIN_AFTER = 0.02
_LIVENESS_INTERVAL = 0.1  # seconds between two checks that the publisher is alive


class LocalParams:
    """A `PackedSource` that stores the last published version in this process. Any thread may call this object."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._newest: tuple[int, PackedParams | None] = (-1, None)
        self._unpacked: tuple[PackedParams | None, Tree] = (None, None)  # cached result of `get_params`

    @property
    def version(self) -> int:
        """The last published version; -1 if no version was published."""
        return self._newest[0]

    def publish(self, version: int, packed: PackedParams) -> None:
        """Replace the stored version. If `packed` contains device arrays, never donate them to a jitted call."""
        with self._changed:
            self._newest = version, packed
            self._changed.notify_all()

    def get_packed(self, known_version: int = -1) -> tuple[int, PackedParams | None]:
        """See `PackedSource`."""
        version, packed = self._newest
        return version, None if version == known_version else packed

    def get_params(self, known_version: int = -1) -> tuple[int, Tree | None]:
        """See `ParamSource`. All callers share the returned arrays, so do not write to these arrays."""
        version, packed = self.get_packed(known_version)
        if packed is None:
            return version, None
        unpacked = self._unpacked
        if unpacked[0] is not packed:
            self._unpacked = unpacked = packed, packed.unpack_numpy()
        return version, unpacked[1]

    def wait_for_version(self, known_version: int, timeout: float) -> int:
        """See `ParamSource`."""
        with self._changed:
            self._changed.wait_for(lambda: self.version > known_version, min(timeout, LONGEST_WAIT))
        return self.version


class Publication(LocalParams):
    """The newest version in this process and, after the first call of `reader`, in shared memory.

    Args:
        version: the first version.
        packed: the first version's parameters for acting. All versions have the same packing.
    """

    def __init__(self, version: int, packed: PackedParams) -> None:
        super().__init__()
        self._packing = packed.packing
        self._lock = threading.Lock()
        self._memory: _Memory | None = None
        self._writer: threading.Thread | None = None
        self.publish(version, packed)

    def publish(self, version: int, packed: PackedParams) -> None:
        """Publish a newer version. Before any process has read, a checkpoint's older version is also allowed."""
        super().publish(version, packed)
        with self._lock:
            if self._memory is not None:
                self._memory.announce(version)

    def reader(self) -> PublicationReader | None:
        """Return a reader for other processes of this machine, or None after `close` or without shared memory."""
        with self._lock:
            if self._memory is None and SUPPORTED:
                self._memory = _Memory(SharedArrays.create(_LABEL, _fields(self._packing)), self._packing)
                self._memory.begin(self.version)
                self._writer = threading.Thread(
                    target=self._write_requested, args=(self._memory,), name="rlframe parameters", daemon=True
                )
                self._writer.start()
            if self._memory is None or self._writer is None:
                return None
            return PublicationReader(self._memory.arrays.name, self._packing)

    def _write_requested(self, memory: _Memory) -> None:
        """Write each version that readers request, until `close`."""
        answered = 0
        while not memory.arrays.closed:
            requested = memory.requested.value
            if requested == answered:
                memory.requested.wait(requested, 60.0)
                continue
            answered = requested
            version, packed = self.get_packed()
            if packed is not None and version > memory.newest_written()[0]:
                memory.write(version, packed.arrays)
            memory.changed.wake()

    def close(self) -> None:
        """End the writer thread, and wake the readers that wait. Later calls do nothing.

        After this, `ParamReader` calls the publisher instead of reading the memory. A process that has already opened
        the memory can still read the version in it.
        """
        if self._writer is not None and self._memory is not None:
            writer, self._writer = self._writer, None
            self._memory.arrays.close()
            self._memory.changed.wake()
            self._memory.requested.wake()
            writer.join()


class PublicationReader:
    """A reader of a `Publication` in another process of the machine. The reader can be pickled.

    Args:
        name: the name of the memory, which the reader opens at its first use.
        packing: the packing of all versions.
    """

    def __init__(self, name: MemoryName, packing: Packing) -> None:
        self._name, self._packing, self._checked_at = name, packing, 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        # Send the fields as pickled bytes, because Courier cannot send these objects.
        return _reader_of, (pickle.dumps((self._name, self._packing)),)

    @functools.cached_property
    def _memory(self) -> _Memory:
        name = self._name
        try:
            return _Memory(SharedArrays.attach(name, _LABEL, _fields(self._packing)), self._packing)
        except PermissionError as error:
            raise UsageError(
                f"The memory with the parameters of process {name.creator.pid} cannot be opened: {error}. Its readers "
                "must run as the same user, in the same container and on the same Ray node. Other processes call it "
                "over the network."
            ) from None
        except OSError as error:
            raise UnavailableError(
                f"The memory with the parameters of process {name.creator.pid} cannot be opened: the process has "
                f"exited, has closed the memory, or runs on another machine ({type(error).__name__})."
            ) from None

    @property
    def is_gone(self) -> bool:
        """True if the publisher has closed the memory or died. Checks at most ten times a second whether it is alive.

        Raises:
            UnavailableError: the memory was closed before this process first used it, or is on another machine.
            UsageError: the memory belongs to another user or Ray node.
        """
        arrays, now = self._memory.arrays, time.monotonic()
        if arrays.closed or now < self._checked_at + _LIVENESS_INTERVAL:
            return arrays.closed
        self._checked_at = now
        return not arrays.creator_is_alive

    def read(self, known_version: int = -1) -> tuple[int, PackedParams | None] | None:
        """Return the result of `PackedSource.get_packed`, or None if all versions in memory are below `known_version`.

        If a version is announced but not written, wait for it for at most one second.
        """
        memory = self._memory
        if memory.announced == known_version:
            return known_version, None
        self._wait_until_written()
        while True:  # repeat only if the slot was overwritten during the copy
            version, slot = memory.newest_written()
            if version < 0 or version < known_version:
                return None
            arrays = memory.copy_version(slot, version)
            if arrays is not None:
                memory.record_read(version)
                return version, PackedParams(self._packing, arrays)

    def _wait_until_written(self) -> None:
        memory, deadline = self._memory, time.monotonic() + _READ_TIMEOUT
        while not memory.arrays.closed:
            seen = memory.changed.value
            if memory.newest_written()[0] >= memory.announced or time.monotonic() > deadline:
                return
            memory.requested.wake()
            memory.changed.wait(seen, _WAKE_AGAIN_AFTER)


class _Memory:
    """The shared memory of a `Publication`, mapped into this process. The version -1 means that there is no version.

    Readers and the writer take no locks, so that a killed process blocks no other process.

    Attributes:
        changed: wakes readers that wait for a version.
        requested: wakes the writer.
    """

    def __init__(self, arrays: SharedArrays, packing: Packing) -> None:
        self.arrays = arrays
        self.changed, self.requested = (Futex(arrays.rows(name)[0]) for name in ("changed", "requested"))
        self._announced, self._last_read = (arrays.rows(name)[0] for name in ("announced", "last_read"))
        self._versions = [Seqlock(words[: Seqlock.words(1)]) for words in arrays.rows("versions")]  # by slot
        count = len(packing.packed_shapes)
        self._packed = [[arrays.arrays[f"{slot}/{i}"] for i in range(count)] for slot in range(_SLOTS)]

    def begin(self, version: int) -> None:
        """Announce the first version. Call this before the memory has readers."""
        self._announced[0], self._last_read[0] = version, -1
        for slot in range(_SLOTS):
            self._versions[slot].write(-1)

    @property
    def announced(self) -> int:
        """The newest announced version. Its arrays may not be written yet."""
        return self._announced[0]

    def announce(self, version: int) -> None:
        """Announce a newer version. If the previous version has been read, wake the writer thread immediately."""
        was_read = self._last_read[0] == self._announced[0]
        self._announced[0] = version
        if was_read:
            self.requested.wake()

    def record_read(self, version: int) -> None:
        """Record that `version` was read, so that `announce` of the next version wakes the writer at once."""
        self._last_read[0] = version

    def newest_written(self) -> tuple[int, int]:
        """Return (newest completely written version, its slot). The version is -1 if no version is written."""
        return max((version.read()[0], slot) for slot, version in enumerate(self._versions))

    def write(self, version: int, packed: list[Any]) -> None:
        """Write a version to the slot whose version is older."""
        slot = 1 - self.newest_written()[1]
        self._versions[slot].write(-1)
        for target, array in zip(self._packed[slot], packed):
            target[...] = np.asarray(array)  # 25 % faster than without `np.asarray`
        self._versions[slot].write(version)

    def copy_version(self, slot: int, version: int) -> list[np.ndarray] | None:
        """Return a copy of the arrays of `version`, or None if the slot was overwritten in the meantime."""
        lock = self._versions[slot]
        count = lock.count
        if lock.read()[0] != version:
            return None
        packed = [array.copy() for array in self._packed[slot]]
        fence()
        return packed if lock.count == count else None


def _reader_of(pickled: bytes) -> PublicationReader:
    return PublicationReader(*pickle.loads(pickled))


def _fields(packing: Packing) -> Fields:
    word = np.dtype(np.int64)
    fields: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        "changed": ((1,), word),
        "requested": ((1,), word),
        "announced": ((_ROW_WORDS,), word),
        "last_read": ((_ROW_WORDS,), word),
        "versions": ((_SLOTS, _ROW_WORDS), word),
    }
    for slot in range(_SLOTS):
        fields.update({f"{slot}/{i}": packed for i, packed in enumerate(packing.packed_shapes)})
    return fields
