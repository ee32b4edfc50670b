"""A param store in memory that the processes of one machine share.

Each policy has one slot more than versions that are kept or pinned: what is put goes into a slot of none of these.
A slot holds version -1 while it is written, so who reads copies first and looks afterwards whether it was written to.
Who dies while it writes leaves that behind: the slot is no version, and the next to put takes it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
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
from rlframe.interprocess import memory
from rlframe.interprocess.futex import Futex, fence
from rlframe.interprocess.memory import Fields, Name, Seqlock, SharedArrays
from rlframe.packing import Packing
from rlframe.types import Tree

_LABEL = "rlframe-policies"
_LINE = 8  # words of a slot, and of a policy: a line of the cache
_STATE, _PINNED = slice(0, Seqlock.words(2)), 5  # words of a slot: (version + 1, bytes of its hparams); 1 if pinned
_ATTEMPT = slice(0, Seqlock.words(2))  # words of a policy: (its attempt)
_LOCK_TIMEOUT = 30.0  # seconds; a put takes milliseconds


class _Plan(NamedTuple):
    """What all processes must know of a store."""

    name: Name
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
        self._created = SharedArrays.create(_LABEL, _fields(Packing(template), len(policy_ids), kept))
        assert self._created.name is not None
        self.__setstate__(_Plan(self._created.name, template, tuple(policy_ids), kept))

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
        created = getattr(self, "_created", None)  # a copy has none
        if created is not None and not created.closed:
            here = self._memory
            created.close()
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
        try:
            self._memory = SharedArrays.attach(plan.name, _LABEL, _fields(self.packing, policies, plan.kept))
        except OSError as error:
            raise UnavailableError(
                f"The param store of process {plan.name.maker.pid} cannot be opened: that process has ended or closed "
                f"it, or runs as another user or on another machine ({type(error).__name__}). Start the program anew."
            ) from None
        arrays = self._memory.arrays
        self.changed = Futex(self._memory.rows("changed")[0])
        self._attempts = [Seqlock(row[_ATTEMPT]) for row in self._memory.rows("policies")]
        self._slots = self._memory.rows("slots")
        self._states = [Seqlock(words[_STATE]) for words in self._slots]
        self._hparams = arrays["hparams"]
        self._arrays = [
            [arrays[f"{slot}/{i}"] for i in range(len(self.packing.packed_shapes))] for slot in range(len(self._slots))
        ]

    @property
    def closed(self) -> bool:
        """Whether its maker has closed it."""
        return self._memory.closed

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Held by one process at a time."""

        def overdue() -> Exception:
            return PeerError(
                f"Another process has been putting parameters for {_LOCK_TIMEOUT:.0f} s: it was stopped (SIGSTOP) "
                "meanwhile. Let it go on, or kill it."
            )

        return self._memory.lock(_LOCK_TIMEOUT, overdue)

    def opened(self, policy: int) -> Attempt | None:
        """The attempt that has opened a policy; the caller holds the right to write."""
        attempt = self._attempts[policy]
        return Attempt(*attempt.read()) if attempt.count else None

    def open(self, policy: int, attempt: Attempt) -> None:
        """Sets it; the caller holds the right to write, and may die at any word."""
        self._attempts[policy].write(*attempt)

    def state(self, slot: int) -> int:
        """The version in a slot; -1 where there is none, or it is being written."""
        return self._states[slot].read()[0] - 1

    def is_pinned(self, slot: int) -> bool:
        """Whether what is in a slot is to stay."""
        return self._slots[slot][_PINNED] == 1

    def pin(self, slot: int, pinned: bool) -> None:
        """Says whether it is; the caller holds the right to write."""
        self._slots[slot][_PINNED] = int(pinned)

    def write(self, slot: int, version: int, packed: list[np.ndarray], hparams: bytes) -> None:
        """Puts a version into a slot; the caller holds the right to write."""
        self._states[slot].write(0, 0)
        self._slots[slot][_PINNED] = 0
        self._hparams[slot, : len(hparams)] = np.frombuffer(hparams, np.uint8)
        for here, array in zip(self._arrays[slot], packed):
            here[...] = array
        self._states[slot].write(version + 1, len(hparams))

    def read(self, slot: int, version: int) -> StoredParams | None:
        """A copy of `version`, or None where it is not in the slot any more."""
        state = self._states[slot]
        count, (there, size) = state.count, state.read()
        if there - 1 != version:
            return None
        hparams = self._hparams[slot, :size].tobytes()
        vector, *others = self._arrays[slot]
        params = self.packing.unpack_numpy([vector, *(array.copy() for array in others)])  # which copies the vector
        fence()
        return StoredParams(version, params, json.loads(hparams)) if state.count == count else None


def _slots_each(kept: int) -> int:
    """How many a policy has."""
    return kept + PINS + 1


def _fields(packing: Packing, policies: int, kept: int) -> Fields:
    slots, word = policies * _slots_each(kept), np.dtype(np.int64)
    fields: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        "changed": ((1,), word),  # wakes who waits for a version; of any policy
        "policies": ((policies, _LINE), word),
        "slots": ((slots, _LINE), word),
        "hparams": ((slots, HPARAMS_BYTES), np.dtype(np.uint8)),
    }
    for slot in range(slots):
        fields.update({f"{slot}/{i}": packed for i, packed in enumerate(packing.packed_shapes)})
    return fields
