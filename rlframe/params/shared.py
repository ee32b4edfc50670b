"""A param store in memory that the processes of one machine share.

Each policy has one slot more than versions that are kept or pinned: what is put goes into a slot of none of these.
A slot's numbers say that there is no version in it while it is written, so who reads copies first and looks afterwards
whether they were written meanwhile. Who dies while it writes leaves a slot without a version: the next to put takes it.

A version may also be offered: then the number alone is told, and it is put when a reader wants it, or at once if the
one before was read. So a version that nobody reads costs next to nothing, and who reads gets the newest.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlframe.errors import UnavailableError, UsageError
from rlframe.interprocess.futex import Futex, fence
from rlframe.interprocess.memory import SUPPORTED, Fields, Name, Seqlock, SharedArrays
from rlframe.params import store
from rlframe.params.packing import PackedParams, Packing
from rlframe.params.source import PackedSource
from rlframe.params.store import HPARAMS_BYTES, PINS, Attempt, ParamStore, StoredParams, overdue
from rlframe.types import Tree

_LABEL = "rlframe-policies"
_LINE = 8  # words of a slot, and of a policy: a line of the cache
_STATE, _PINNED = slice(0, Seqlock.words(2)), 5  # words of a slot: (version + 1, bytes of its hparams); 1 if pinned
# Words of a policy: (its attempt); the newest version + 1; the version + 1 that was read last.
_ATTEMPT, _NEWEST, _READ = slice(0, Seqlock.words(2)), 5, 6
_PATIENCE = 1.0  # seconds to wait for an offered version
_AGAIN = 0.02  # seconds after which who offered it is woken again: two readers that do so at once may undo each other's
_LOOK = 0.1  # seconds between two looks whether the maker is alive


class _Plan(NamedTuple):
    """What all processes must know of a store."""

    name: Name
    packing: Packing
    policy_ids: tuple[str, ...]
    kept: int


class SharedParamStore(ParamStore):
    """Policies in anonymous memory of the process that makes it, for all processes of this machine it is pickled to.

    The object that was made must live as long as others may come, and is not to be used before a fork and after it.

    Args:
        template: the parameters' tree, the same for all policies: arrays, or anything with `shape` and `dtype`; or its
            `Packing`.
        policy_ids: whose parameters it holds.
        kept: versions of each.

    Raises:
        UsageError: this system has no such memory.
    """

    def __init__(self, template: Tree | Packing, policy_ids: Sequence[str] = ("main",), kept: int = 4) -> None:
        super().__init__(kept)
        if not policy_ids or len(set(policy_ids)) < len(policy_ids):
            raise UsageError(f"A SharedParamStore holds at least one policy, each named once; got {list(policy_ids)}.")
        if not SUPPORTED:
            raise UsageError("SharedParamStore needs Linux on x86-64 or 64-bit ARM. Use FileParamStore instead.")
        packing = template if isinstance(template, Packing) else Packing(template)
        created = SharedArrays.create(_LABEL, _fields(packing, len(policy_ids), kept))
        assert created.name is not None
        self.__setstate__(_Plan(created.name, packing, tuple(policy_ids), kept))
        self._created: SharedArrays | None = created

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
        self._mapped: _Memory | None = None
        self._looked = 0.0
        self._created = None  # where it was made
        self._offered: set[str] = set()  # policies

    @property
    def _memory(self) -> _Memory:
        """The memory, mapped on first use."""
        if self._mapped is None:
            with self._lock:
                self._mapped = self._mapped or _Memory(self._plan)
        return self._mapped

    @property
    def has_gone(self) -> bool:
        """Whether its maker has closed it, or ended: looked at ten times a second.

        Raises:
            UnavailableError: it had gone before this process used it, or is on another machine.
        """
        now = time.monotonic()
        if self._memory.arrays.closed or now < self._looked + _LOOK:
            return self._memory.arrays.closed
        self._looked = now
        return not self._memory.arrays.creator_is_alive

    def opened(self, policy_id: str) -> Attempt | None:
        attempt = self._memory.attempts[self._policy(policy_id)]
        return Attempt(*attempt.read()) if attempt.count else None

    def newest(self, policy_id: str) -> int:
        """The newest version that was put or offered; -1 where there is none. One look at one word."""
        return self._memory.policies[self._policy(policy_id)][_NEWEST] - 1

    def get(self, policy_id: str, min_version: int = -1, *, version: int | None = None) -> StoredParams | None:
        """See `ParamStore`. Waits, for a second at most, until a version that is offered is there."""
        if version is None:
            self._want(policy_id)
        return super().get(policy_id, min_version, version=version)

    def offer(self, policy_id: str, version: int) -> None:
        """Tells readers that there is a newer version, which `answer` puts."""
        self._offered.add(policy_id)
        words = self._memory.policies[self._policy(policy_id)]
        was_read = 0 < words[_READ] == words[_NEWEST]
        self._set_newest(policy_id, version)
        if was_read:  # who did so will want this one as well
            self._memory.wanted.wake()

    def answer(self, policy_id: str, source: PackedSource) -> None:
        """Puts what readers of one policy want, until the store is closed: for a thread of who offers.

        Args:
            policy_id: whose versions were offered.
            source: gives the one that was offered last, or a newer one.
        """
        here, answered = self._memory, 0
        while not here.arrays.closed:
            wanted = here.wanted.value
            if wanted == answered:
                here.wanted.wait(wanted, 60.0)
                continue
            answered = wanted
            version, packed = source.get_packed()
            if packed is not None and version > super().newest(policy_id) and not here.arrays.closed:
                self.put(policy_id, version, packed)
            here.changed.wake()

    def _want(self, policy_id: str) -> None:
        here, deadline = self._memory, time.monotonic() + _PATIENCE
        while not here.arrays.closed:
            seen = here.changed.value
            if super().newest(policy_id) >= self.newest(policy_id) or time.monotonic() > deadline:
                return
            here.wanted.wake()
            here.changed.wait(seen, _AGAIN)

    def close(self) -> None:
        """Where the store was made: nothing is put any more, and nobody waits. What is there can be read."""
        if self._created is not None:
            here = self._memory
            self._created.close()
            here.changed.wake()
            here.wanted.wake()

    @property
    def _closed(self) -> bool:  # type: ignore[override]
        return self._memory.arrays.closed

    def _check_policy(self, policy_id: str) -> None:
        if policy_id not in self._plan.policy_ids:
            known = ", ".join(map(repr, self._plan.policy_ids))
            raise UsageError(f"This param store was made for the policies {known}; it cannot hold {policy_id!r}.")

    def _policy(self, policy_id: str) -> int:
        self._check_policy(policy_id)
        return self._plan.policy_ids.index(policy_id)

    def _slots(self, policy_id: str) -> dict[int, int]:
        """Version -> slot, of those that are whole."""
        count = _slots_each(self.kept)
        first = self._policy(policy_id) * count
        written = {slot: self._memory.states[slot].read()[0] for slot in range(first, first + count)}
        return {number - 1: slot for slot, number in written.items() if number}

    @contextlib.contextmanager
    def _writing(self, policy_id: str) -> Iterator[None]:
        self._check_policy(policy_id)
        with self._lock, self._memory.arrays.lock(store.LOCK_TIMEOUT, overdue):
            yield

    def _set_opened(self, policy_id: str, attempt: Attempt) -> None:
        self._memory.attempts[self._policy(policy_id)].write(*attempt)

    def _set_newest(self, policy_id: str, version: int) -> None:
        self._memory.policies[self._policy(policy_id)][_NEWEST] = version + 1

    def _there(self, policy_id: str) -> dict[int, bool]:
        slots = sorted(self._slots(policy_id).items())
        return {version: self._memory.slots[slot][_PINNED] == 1 for version, slot in slots}

    def _set_pinned(self, policy_id: str, version: int, pinned: bool) -> None:
        self._memory.slots[self._slots(policy_id)[version]][_PINNED] = int(pinned)

    def _write(self, policy_id: str, version: int, prepared: tuple[PackedParams, bytes]) -> None:
        packed, hparams = prepared
        if packed.packing != self._plan.packing:
            raise UsageError(_difference(self._plan.packing.template, packed.packing.template))
        taken, spared = self._slots(policy_id), self.versions(policy_id)
        kept = {taken[version] for version in spared if version in taken}
        first = self._policy(policy_id) * _slots_each(self.kept)
        slot = next(slot for slot in range(first, first + _slots_each(self.kept)) if slot not in kept)
        self._memory.write(slot, version, packed.arrays, hparams)
        if policy_id not in self._offered:  # else a newer one may be offered just now
            self._set_newest(policy_id, version)

    def _read(self, policy_id: str, version: int) -> tuple[PackedParams, bytes] | None:
        slot = self._slots(policy_id).get(version)
        found = None if slot is None else self._memory.read(slot, version)
        if found is None:
            return None
        self._memory.policies[self._policy(policy_id)][_READ] = version + 1
        return PackedParams(self._plan.packing, found[0]), found[1]

    def _change(self) -> int:
        return self._memory.changed.value

    def _wait(self, seen: int, seconds: float) -> None:
        self._memory.changed.wait(seen, seconds)

    def _wake(self) -> None:
        self._memory.changed.wake()


class _Memory:
    """The memory of a store, mapped into this process.

    Attributes:
        arrays: who holds their lock may write.
        changed: wakes who waits for a version.
        wanted: wakes who has offered one.
        policies, slots: words of each, as above.
        attempts: of each policy, which has opened it; not written yet where none has.
        states: of each slot, see `_STATE`.
    """

    def __init__(self, plan: _Plan) -> None:
        try:
            self.arrays = SharedArrays.attach(plan.name, _LABEL, _fields(plan.packing, len(plan.policy_ids), plan.kept))
        except PermissionError as error:
            raise UsageError(
                f"The param store of process {plan.name.maker.pid} cannot be opened: {error}. All its processes must "
                "run as the same user, in the same container or on the same Ray node; a FileParamStore needs no such "
                "memory."
            ) from None
        except OSError as error:
            raise UnavailableError(
                f"The param store of process {plan.name.maker.pid} cannot be opened: that process has ended or closed "
                f"it, or runs on another machine ({type(error).__name__}). Start the program anew."
            ) from None
        arrays = self.arrays.arrays
        self.changed, self.wanted = (Futex(self.arrays.rows(name)[0]) for name in ("changed", "wanted"))
        self.policies, self.slots = self.arrays.rows("policies"), self.arrays.rows("slots")
        self.attempts = [Seqlock(words[_ATTEMPT]) for words in self.policies]
        self.states = [Seqlock(words[_STATE]) for words in self.slots]
        self._hparams = arrays["hparams"]
        count = len(plan.packing.packed_shapes)
        self._packed = [[arrays[f"{slot}/{i}"] for i in range(count)] for slot in range(len(self.slots))]

    def write(self, slot: int, version: int, packed: list[Any], hparams: bytes) -> None:
        """Puts a version into a slot; the caller holds the right to write."""
        self.states[slot].write(0, 0)
        self.slots[slot][_PINNED] = 0
        self._hparams[slot, : len(hparams)] = np.frombuffer(hparams, np.uint8)
        for here, array in zip(self._packed[slot], packed):
            here[...] = np.asarray(array)  # a quarter less time than where NumPy is given a device's array
        self.states[slot].write(version + 1, len(hparams))

    def read(self, slot: int, version: int) -> tuple[list[np.ndarray], bytes] | None:
        """Copies of the arrays and hparams of `version`; None where it is not in the slot any more."""
        state = self.states[slot]
        count, (there, size) = state.count, state.read()
        if there - 1 != version:
            return None
        hparams = self._hparams[slot, :size].tobytes()
        packed = [array.copy() for array in self._packed[slot]]
        fence()
        return (packed, hparams) if state.count == count else None


def _difference(expected: Tree, came: Tree) -> str:
    """What to say of a tree that is not as the store's."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(expected)
    others, given = jax.tree.flatten(came)
    if given != treedef:
        return f"The parameters that were put are no tree as the param store's: {given}, not {treedef}."
    path, leaf, other = next((path, leaf, other) for (path, leaf), other in zip(leaves, others) if leaf != other)
    return (
        f"The parameters{jax.tree_util.keystr(path)} that were put are {other.dtype}{list(other.shape)}; the param "
        f"store was made for {leaf.dtype}{list(leaf.shape)}."
    )


def _slots_each(kept: int) -> int:
    """How many a policy has."""
    return kept + PINS + 1


def _fields(packing: Packing, policies: int, kept: int) -> Fields:
    slots, word = policies * _slots_each(kept), np.dtype(np.int64)
    fields: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        "changed": ((1,), word),  # wakes who waits for a version; of any policy
        "wanted": ((1,), word),  # wakes who has offered a version; by readers
        "policies": ((policies, _LINE), word),
        "slots": ((slots, _LINE), word),
        "hparams": ((slots, HPARAMS_BYTES), np.dtype(np.uint8)),
    }
    for slot in range(slots):
        fields.update({f"{slot}/{i}": packed for i, packed in enumerate(packing.packed_shapes)})
    return fields
