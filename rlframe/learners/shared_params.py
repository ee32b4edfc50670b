"""Parameters in shared memory: a learner's newest, for the inferencers on its machine.

Two slots, of which one is whole. The learner only notes the number of each new version;
the arrays are written when a reader wants them, by a thread. So a version that nobody reads costs next to nothing, and
who reads always gets the newest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rlframe.errors import NoMethodError
from rlframe.interprocess.futex import Futex, fence
from rlframe.interprocess.memory import Fields, Name, Seqlock, SharedArrays
from rlframe.packing import Packing
from rlframe.transport import Client, Future
from rlframe.types import Tree

# Words of the memory, on cache lines by who writes to them.
NEWEST = 0  # the version that the learner has
WRITTEN = slice(1, 1 + Seqlock.words(2))  # (version, slot) that was written last
WRITTEN_FUTEX = 6  # wakes who waits for a slot
WANTED_FUTEX = 16  # wakes the thread that writes; by readers
_WORDS = 24

_LABEL = "rlframe-params"
_PATIENCE = 1.0  # seconds to wait for a learner that does not write; then a call finds out what is the matter
_AGAIN = 0.02  # seconds after which it is woken again: two readers that do so at once may undo each other's
_LOOK = 0.1  # seconds between two looks whether the learner is alive

_Packed = list[Any]  # arrays, as `Packing` has them


class ParamsPublisher:
    """The learner's side.

    Args:
        packing: of the parameters.
        newest: gives (version, packed arrays). Versions rise.

    Attributes:
        name: where `LearnerClient` finds the memory.
    """

    def __init__(self, packing: Packing, newest: Callable[[], tuple[int, _Packed]]) -> None:
        self._newest = newest
        self._slots = _Slots(SharedArrays.create(_LABEL, _fields(packing)))
        self.name: Name | None = self._slots.memory.name
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="rlframe parameters", daemon=True)
        self._thread.start()

    def announce(self) -> None:
        """Tells readers that there is a newer version."""
        with self._lock:  # two threads at once might note the older one last
            self._slots.words[NEWEST] = self._newest()[0]

    def close(self) -> None:
        """Ends the thread; readers call the learner from then on. May be called again."""
        if self.name is not None:
            self.name = None
            self._slots.memory.close()
            self._slots.wanted.wake()
            self._thread.join()

    def _run(self) -> None:
        answered = 0
        while not self._slots.memory.closed:
            wanted = self._slots.wanted.value
            if wanted == answered:
                self._slots.wanted.wait(wanted, 60.0)
                continue
            answered = wanted
            version, packed = self._newest()
            if version != self._slots.version():
                self._slots.write(version, [np.asarray(array) for array in packed])
            self._slots.written.wake()


class LearnerClient:
    """A client of a learner, whose parameters are read from shared memory where they lie there. It wraps one.

    Whether they do is asked at the first call, and again when a learner that shared them has gone.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._asks = True
        self._shared: _SharedParams | None = None

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """See `rlframe.transport.Client`; `get_params` as that of `Learner`."""
        if method == "get_params":
            return self._get_params(*args, **kwargs)
        return self._client.call(method, *args, **kwargs)

    def submit(self, method: str, /, *args: Any) -> Future:
        """See `rlframe.transport.Client`; parameters that are asked for in this way travel."""
        return self._client.submit(method, *args)

    def _get_params(self, known_version: int = -1) -> tuple[int, Tree | None]:
        if self._shared is not None:
            answer = self._shared.get_params(known_version)
            if answer is not None:
                return answer
            self._shared, self._asks = None, True
        if not self._asks:
            return self._client.call("get_params", known_version)
        version, params = self._client.call("get_params", -1)
        self._shared = self._find(params)
        self._asks = False
        return version, None if version == known_version else params

    def _find(self, params: Tree) -> _SharedParams | None:
        try:
            name = self._client.call("shared_params")
        except NoMethodError:
            return None  # not a Learner, but something that has `get_params` too
        try:
            return _SharedParams(Packing(params), name) if name is not None else None
        except OSError:  # on another machine, or of another user
            return None


class _SharedParams:
    """The parameters of a learner on this machine, as readers see them."""

    def __init__(self, packing: Packing, name: Name) -> None:
        self._packing = packing
        self._slots = _Slots(SharedArrays.attach(name, _LABEL, _fields(packing)))
        self._looked = time.monotonic()

    def get_params(self, known_version: int) -> tuple[int, Tree | None] | None:
        """As `Learner.get_params`; None where the learner has gone, or does not write."""
        slots, now = self._slots, time.monotonic()
        if now > self._looked + _LOOK:
            self._looked = now
            if not slots.memory.creator_is_alive:
                return None
        if slots.memory.closed:
            return None
        newest = slots.words[NEWEST]
        if newest == known_version:
            return newest, None
        while time.monotonic() < now + _PATIENCE:
            seen = slots.written.value
            if slots.version() < newest:
                slots.wanted.wake()
                slots.written.wait(seen, _AGAIN)
                continue
            version, packed = slots.read()
            if version >= newest:
                return version, self._packing.unpack_numpy(packed)
        return None


class _Slots:
    """The two slots in `memory`."""

    def __init__(self, memory: SharedArrays) -> None:
        self.memory = memory
        (self.words,) = (words,) = memory.rows("words")
        self.wanted, self.written = (Futex(words[at : at + 1]) for at in (WANTED_FUTEX, WRITTEN_FUTEX))
        self._whole = Seqlock(words[WRITTEN])
        self._slots = [
            [array for name, array in memory.arrays.items() if name.startswith(f"{slot}/")] for slot in range(2)
        ]

    def version(self) -> int:
        """The one that was written last."""
        return self._whole.read()[0]

    def write(self, version: int, packed: list[np.ndarray]) -> None:
        """Overwrites the slot that is not whole, and makes it the one that is."""
        slot = 1 - self._whole.read()[1]
        for here, array in zip(self._slots[slot], packed):
            here[...] = array
        self._whole.write(version, slot)

    def read(self) -> tuple[int, _Packed]:
        """(version, copies) of the slot that is whole; version -1 where it was overwritten meanwhile."""
        count, (version, slot) = self._whole.count, self._whole.read()
        packed = [array.copy() for array in self._slots[slot]]
        fence()
        return version if self._whole.count == count else -1, packed


def _fields(packing: Packing) -> Fields:
    fields: Fields = {"words": ((_WORDS,), np.dtype(np.int64))}
    slots = [{f"{slot}/{i}": packed for i, packed in enumerate(packing.packed_shapes)} for slot in range(2)]
    return {**fields, **slots[0], **slots[1]}
