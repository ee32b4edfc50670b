"""A param store in memory that the processes of one machine share.

Each policy has one slot more than versions that are kept or pinned: what is put goes into a slot of none of these.
A slot's count is odd while it is written, so who reads copies first and looks afterwards whether the count has moved.
Who dies while it writes leaves an odd count behind: that slot is no version, and the next to put takes it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlframe.coordinator.param_store import (
    HPARAMS_BYTES,
    LONGEST_WAIT,
    PINS,
    Attempt,
    ParamStore,
    StoredParams,
    check_attempt,
    check_rises,
)
from rlframe.errors import PeerError, StoppedError, UnavailableError, UsageError
from rlframe.interprocess import locks, memory
from rlframe.interprocess.futex import Futex, fence
from rlframe.packing import Packing
from rlframe.types import Tree

_LABEL = "rlframe-policies"
_FUTEX = 8  # the word that wakes who waits for a version; of any policy
_SLOTS = 16  # the word at which the slots' begin
_COUNT, _VERSION, _HPARAMS, _PINNED = 0, 1, 2, 3  # words of a slot: see above; the version; bytes of its hparams; 1
_LINE = 8  # words of a slot: a line of the cache
_WHICH, _PAIRS = 0, (1, 3)  # words of a policy, after those of all slots: which of the pairs is its attempt, 1 or 2
_LOCK_TIMEOUT = 30.0  # seconds; a put takes milliseconds


class _Plan(NamedTuple):
    """What all processes must know of a store."""

    name: memory.Name
    template: Tree  # of jax.ShapeDtypeStruct
    policy_ids: tuple[str, ...]
    kept: int


class SharedParamStore(ParamStore):
    """Policies in anonymous memory of the process that makes it, for all processes of this machine it is pickled to.

    The object that was made must live as long as others may come, and is not to be used before a fork and after it.

    Args:
        template: the parameters' tree, the same for all policies: arrays, or anything with `shape` and `dtype`.
        policy_ids: whose parameters it holds.
        kept: versions of each.

    Raises:
        UsageError: this system has no such memory.
    """

    def __init__(self, template: Tree, policy_ids: Sequence[str] = ("main",), kept: int = 4) -> None:
        if kept < 1 or not policy_ids or len(set(policy_ids)) < len(policy_ids):
            raise UsageError(
                f"A SharedParamStore keeps at least one version of at least one policy, each named once; got "
                f"kept={kept}, policy_ids={list(policy_ids)}."
            )
        if not memory.SUPPORTED:
            raise UsageError("SharedParamStore needs Linux on x86-64 or 64-bit ARM. Use FileParamStore instead.")
        template = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), template)
        size = _layout(Packing(template), len(policy_ids), kept)[1]
        self.__setstate__(_Plan(memory.create(_LABEL, size), template, tuple(policy_ids), kept))
        self._finalizer = weakref.finalize(self, memory.destroy, self._plan.name)

    @classmethod
    def of(cls, agent: Any, policy_ids: Sequence[str] = ("main",), kept: int = 4) -> SharedParamStore:
        """A store for what the learner of an agent publishes."""

        def published(rng: jax.Array) -> Tree:
            params = agent.initial_params(rng)
            return agent.actor_params(params, agent.initial_learner_state(params))

        return cls(jax.eval_shape(published, jax.random.PRNGKey(0)), policy_ids, kept)

    def __getstate__(self) -> _Plan:
        return self._plan

    def __setstate__(self, plan: _Plan) -> None:
        self._plan, self.kept = plan, plan.kept
        self._lock = threading.RLock()
        self._opened: _Memory | None = None

    @property
    def _memory(self) -> _Memory:
        """The memory, mapped on first use."""
        if self._opened is None:
            with self._lock:
                self._opened = self._opened or _Memory(self._plan)
        return self._opened

    def open(self, policy_id: str, attempt: Attempt) -> None:
        policy = self._policy(policy_id)
        with self._lock, self._memory.writing():
            opened = self._memory.opened(policy)
            check_attempt(policy_id, attempt, opened)
            if attempt != opened:
                self._memory.open(policy, attempt)

    def opened(self, policy_id: str) -> Attempt | None:
        policy = self._policy(policy_id)
        with self._lock, self._memory.writing():
            return self._memory.opened(policy)

    def _put(self, policy_id: str, version: int, params: Tree, hparams: bytes, attempt: Attempt | None) -> None:
        slots = self._slots(policy_id)
        packed = self._packed(params)
        with self._lock, self._memory.writing():
            if self._memory.closed:
                raise StoppedError(f"The param store was closed before version {version} of {policy_id!r} was put.")
            check_attempt(policy_id, attempt, self._memory.opened(self._policy(policy_id)))
            whole = self._whole(slots)
            check_rises(policy_id, version, max(whole, default=-1))
            spared = set(self._spared(whole).values())
            self._memory.write(next(slot for slot in slots if slot not in spared), version, packed, hparams)
        self._memory.changed.wake()

    def get(self, policy_id: str, min_version: int = -1, *, version: int | None = None) -> StoredParams | None:
        slots = self._slots(policy_id)
        while True:  # again only where `kept` newer versions came while one was copied
            whole = self._kept(slots)
            wanted = max(whole, default=-1) if version is None else version
            if wanted not in whole or wanted < min_version:
                return None
            found = self._memory.read(whole[wanted], wanted)
            if found is not None:
                return found

    def pin(self, policy_id: str) -> int:
        slots = self._slots(policy_id)
        with self._lock, self._memory.writing():
            whole = self._whole(slots)
            newest = max(whole, default=-1)
            if newest < 0:
                return -1
            pinned = sorted(version for version, slot in whole.items() if self._memory.is_pinned(slot))
            for version in [version for version in pinned if version != newest][: 1 - PINS or None]:
                self._memory.pin(whole[version], False)
            self._memory.pin(whole[newest], True)
            return newest

    def unpin(self, policy_id: str, version: int) -> None:
        slots = self._slots(policy_id)
        with self._lock, self._memory.writing():
            slot = self._whole(slots).get(version)
            if slot is not None:
                self._memory.pin(slot, False)

    def versions(self, policy_id: str) -> list[int]:
        return sorted(self._kept(self._slots(policy_id)))

    def newest(self, policy_id: str) -> int:
        return max(self._whole(self._slots(policy_id)), default=-1)

    def wait_for_version(self, policy_id: str, known: int, timeout: float) -> int:
        here, deadline = self._memory, time.monotonic() + min(timeout, LONGEST_WAIT)
        while True:
            value = here.changed.value
            newest, left = self.newest(policy_id), deadline - time.monotonic()
            if newest > known:
                return newest
            if here.closed:
                raise StoppedError(f"The param store was closed while a version of {policy_id!r} was waited for.")
            if left <= 0:
                return newest
            here.changed.wait(value, left)

    def close(self) -> None:
        """Where the store was made: nothing is put any more, and nobody waits. What is there can be read."""
        finalizer = getattr(self, "_finalizer", None)  # a copy has none
        if finalizer is not None and finalizer.alive:
            here = self._memory
            finalizer()
            here.changed.wake()

    def _slots(self, policy_id: str) -> range:
        count = _slots_each(self.kept)
        first = self._policy(policy_id) * count
        return range(first, first + count)

    def _policy(self, policy_id: str) -> int:
        self._check_policy(policy_id)
        return self._plan.policy_ids.index(policy_id)

    def _check_policy(self, policy_id: str) -> None:
        if policy_id not in self._plan.policy_ids:
            known = ", ".join(map(repr, self._plan.policy_ids))
            raise UsageError(f"This param store was made for the policies {known}; it cannot hold {policy_id!r}.")

    def _whole(self, slots: range) -> dict[int, int]:
        """Version -> slot."""
        states = {slot: self._memory.state(slot) for slot in slots}
        return {version: slot for slot, version in states.items() if version >= 0}

    def _kept(self, slots: range) -> dict[int, int]:
        return self._spared(self._whole(slots))

    def _spared(self, whole: dict[int, int]) -> dict[int, int]:
        newest = sorted(whole)[-self.kept :]
        return {version: slot for version, slot in whole.items() if version in newest or self._memory.is_pinned(slot)}

    def _packed(self, params: Tree) -> list[np.ndarray]:
        expected, treedef = jax.tree_util.tree_flatten_with_path(self._plan.template)
        leaves, given = jax.tree.flatten(params)
        if given != treedef:
            raise UsageError(f"The parameters that were put are no tree as the param store's: {given}, not {treedef}.")
        for (path, leaf), array in zip(expected, leaves):
            if tuple(array.shape) != leaf.shape or array.dtype != leaf.dtype:
                raise UsageError(
                    f"The parameters{jax.tree_util.keystr(path)} that were put are {array.dtype}{list(array.shape)}; "
                    f"the param store was made for {leaf.dtype}{list(leaf.shape)}."
                )
        return self._memory.packing.pack_numpy(treedef.unflatten([np.asarray(array) for array in leaves]))


class _Memory:
    """The memory of a store, mapped into this process.

    Attributes:
        packing: of the parameters.
        changed: wakes who waits for a version.
    """

    def __init__(self, plan: _Plan) -> None:
        self.packing = Packing(plan.template)
        policies = len(plan.policy_ids)
        offsets, size = _layout(self.packing, policies, plan.kept)
        try:
            self._descriptor, mapped = memory.attach(plan.name, _LABEL, size)
        except OSError as error:
            raise UnavailableError(
                f"The param store of process {plan.name.maker.pid} cannot be opened: that process has ended or closed "
                f"it, or runs as another user or on another machine ({type(error).__name__}). Start the program anew."
            ) from None
        weakref.finalize(self, os.close, self._descriptor)
        self._words = memoryview(mapped)[: 8 * (_SLOTS + _LINE * (len(offsets) + policies))].cast("q")
        self._policies = _SLOTS + _LINE * len(offsets)
        self._bytes = memoryview(mapped)
        self.changed = Futex(mapped, 8 * _FUTEX)
        self._hparams = [slot[0] for slot in offsets]
        self._arrays: list[list[np.ndarray]] = [
            [np.ndarray(shape, dtype, mapped, at) for (shape, dtype), at in zip(self.packing.packed_shapes, slot[1:])]
            for slot in offsets
        ]

    @property
    def closed(self) -> bool:
        """Whether its maker has closed it."""
        return self._words[memory.CLOSED] == 1

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Held by one process at a time."""

        def overdue() -> Exception:
            return PeerError(
                f"Another process has been putting parameters for {_LOCK_TIMEOUT:.0f} s: it was stopped (SIGSTOP) "
                "meanwhile. Let it go on, or kill it."
            )

        return locks.held(self._descriptor, _LOCK_TIMEOUT, overdue)

    def opened(self, policy: int) -> Attempt | None:
        """The attempt that has opened a policy; the caller holds the right to write."""
        at = self._policies + _LINE * policy
        which = self._words[at + _WHICH]
        if not which:
            return None
        pair = at + _PAIRS[which - 1]
        return Attempt(self._words[pair], self._words[pair + 1])

    def open(self, policy: int, attempt: Attempt) -> None:
        """Sets it; the caller holds the right to write, and may die at any word."""
        at = self._policies + _LINE * policy
        other = 1 if self._words[at + _WHICH] == 2 else 2
        pair = at + _PAIRS[other - 1]
        self._words[pair], self._words[pair + 1] = attempt
        fence()
        self._words[at + _WHICH] = other

    def state(self, slot: int) -> int:
        """The version in a slot; -1 where there is none, or it is being written."""
        at = _SLOTS + _LINE * slot
        while True:  # again only where it was written to meanwhile
            count = self._words[at + _COUNT]
            fence()
            version = self._words[at + _VERSION] if count and not count & 1 else -1
            fence()
            if self._words[at + _COUNT] == count:
                return version

    def is_pinned(self, slot: int) -> bool:
        """Whether what is in a slot is to stay."""
        return self._words[_SLOTS + _LINE * slot + _PINNED] == 1

    def pin(self, slot: int, pinned: bool) -> None:
        """Says whether it is; the caller holds the right to write."""
        self._words[_SLOTS + _LINE * slot + _PINNED] = int(pinned)

    def write(self, slot: int, version: int, packed: list[np.ndarray], hparams: bytes) -> None:
        """Puts a version into a slot; the caller holds the right to write."""
        at, words = _SLOTS + _LINE * slot, self._words
        words[at + _COUNT] |= 1  # odd already where somebody died here
        count = words[at + _COUNT]
        fence()
        words[at + _VERSION], words[at + _HPARAMS], words[at + _PINNED] = version, len(hparams), 0
        low = self._hparams[slot]
        self._bytes[low : low + len(hparams)] = hparams
        for here, array in zip(self._arrays[slot], packed):
            here[...] = array
        fence()
        words[at + _COUNT] = count + 1

    def read(self, slot: int, version: int) -> StoredParams | None:
        """A copy of `version`, or None where it is not in the slot any more."""
        at, words = _SLOTS + _LINE * slot, self._words
        count = words[at + _COUNT]
        fence()
        if count & 1 or words[at + _VERSION] != version:
            return None
        low = self._hparams[slot]
        hparams = bytes(self._bytes[low : low + words[at + _HPARAMS]])
        vector, *others = self._arrays[slot]
        params = self.packing.unpack_numpy([vector, *(array.copy() for array in others)])  # which copies the vector
        fence()
        return StoredParams(version, params, json.loads(hparams)) if words[at + _COUNT] == count else None


def _slots_each(kept: int) -> int:
    """How many a policy has."""
    return kept + PINS + 1


def _layout(packing: Packing, policies: int, kept: int) -> tuple[list[list[int]], int]:
    """(of each slot the offsets of its hparams and arrays, total bytes), on lines of their own."""
    slots = policies * _slots_each(kept)
    position = -(-8 * (_SLOTS + _LINE * (slots + policies)) // mmap.PAGESIZE) * mmap.PAGESIZE
    offsets = []
    for _ in range(slots):
        own = [position]
        position += HPARAMS_BYTES
        for shape, dtype in packing.packed_shapes:
            own.append(position)
            position += -(-int(np.prod(shape, dtype=np.int64)) * dtype.itemsize // 64) * 64
        offsets.append(own)
    return offsets, position
