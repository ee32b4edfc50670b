"""Where policies lie: parameters under rising versions, put by a learner and fetched by whoever acts.

What all stores promise is here. `shared.py` keeps policies in memory that the processes of one machine share,
`files.py` in files: each says how a version is written and read, and how one writer keeps others out.
"""

from __future__ import annotations

import abc
import contextlib
import json
import pickle
import time
from typing import Any, NamedTuple

import jax

from rlframe.errors import FencedError, PeerError, StoppedError, UsageError
from rlframe.params.packing import PackedParams
from rlframe.params.source import LONGEST_WAIT, unpacked
from rlframe.types import Tree

HPARAMS_BYTES = 16 * 1024  # of a version's hyper-parameters, at most, as JSON
PINS = 2  # versions of a policy that can be pinned at once
_LOOK = 0.02  # seconds between two looks at a store that cannot say when it changes
LOCK_TIMEOUT = 30.0  # seconds that a writer waits for another, which takes milliseconds


class StoredParams(NamedTuple):
    """One version of a policy."""

    version: int
    packed: PackedParams
    hparams: dict[str, Any] | None  # what was put with them

    @property
    def params(self) -> Tree:
        """The tree, of numpy arrays that are the caller's own."""
        return jax.tree.map(lambda leaf: leaf if leaf.flags.writeable else leaf.copy(), self.packed.unpack())


class Attempt(NamedTuple):
    """Which of those that put a policy's versions, one after the other, somebody is: the greater is the newer.

    A coordinator numbers the attempts of a task from 0, and so begins anew with each session. Hence the epoch, which
    comes first: a store that outlives a session lets the next one in.
    """

    epoch: int  # when the task began, in milliseconds of Unix time; 0 for who numbers attempts across all sessions
    number: int  # of the attempt at the task, from 0


class ParamStore(abc.ABC):
    """The newest versions of each policy. Every method may be called from any thread of any process.

    A version is there whole or not at all, whatever happens to the process that puts it, and versions of a policy only
    rise: a learner that was restarted goes on above what it had put.

    Who `open`s a policy fences off all attempts before its own: they may have been stopped or cut off, and wake up at
    any time. A policy that nobody opened takes what anybody puts.

    Args:
        kept: how many versions of each policy there are, the newest ones.
    """

    def __init__(self, kept: int) -> None:
        if kept < 1:
            raise UsageError(f"A {type(self).__name__} keeps at least one version, got kept={kept}.")
        self.kept = kept

    def open(self, policy_id: str, attempt: Attempt) -> None:
        """From now on only this attempt puts, until a newer one does the same. May be said again.

        Raises:
            FencedError: a newer one has.
        """
        with self._writing(policy_id):
            opened = self.opened(policy_id)
            check_attempt(policy_id, attempt, opened)
            if attempt != opened:
                self._set_opened(policy_id, attempt)

    @abc.abstractmethod
    def opened(self, policy_id: str) -> Attempt | None:
        """The attempt that may put; None where the policy was never opened, and everybody may."""

    def check(self, policy_id: str, attempt: Attempt | None) -> None:
        """Raises `FencedError` where `put` would, by the attempt: for what is written elsewhere than here."""
        check_attempt(policy_id, attempt, self.opened(policy_id))

    def put(
        self,
        policy_id: str,
        version: int,
        params: Tree | PackedParams,
        hparams: dict[str, Any] | None = None,
        *,
        attempt: Attempt | None = None,
    ) -> None:
        """Makes `params` the newest version of a policy, and lets go of the one that is `kept` versions before it.

        Args:
            policy_id: whose.
            version: from 0, above all that were put before.
            params: packed, as a Learner's `get_packed` gives them; or a tree of arrays. Device arrays are fetched.
            hparams: what belongs to them, as JSON can say it; `HPARAMS_BYTES` at most.
            attempt: whose they are; needed where the policy was opened.

        Raises:
            FencedError: a newer attempt has opened the policy. Nothing is changed.
            UsageError: the version is not above the newest; or what is put cannot be.
        """
        if version < 0:
            raise UsageError(f"Versions of a policy start at 0, got {version} for {policy_id!r}.")
        encoded = _encode(policy_id, hparams)
        packed = params if isinstance(params, PackedParams) else PackedParams.of(params)
        prepared = self._prepare(policy_id, version, packed, encoded)
        with self._writing(policy_id):
            if self._closed:
                raise StoppedError(f"The param store was closed before version {version} of {policy_id!r} was put.")
            check_attempt(policy_id, attempt, self.opened(policy_id))
            newest = max(self._there(policy_id), default=-1)
            if version <= newest:
                raise UsageError(
                    f"Version {version} of policy {policy_id!r} was put, but version {newest} is there already: "
                    f"versions only rise. A learner that is restarted publishes above {newest}."
                )
            self._write(policy_id, version, prepared)
            self._drop_old(policy_id)
        self._wake()

    def get(self, policy_id: str, min_version: int = -1, *, version: int | None = None) -> StoredParams | None:
        """The newest version; None where there is none, or only ones below `min_version`.

        Args:
            policy_id: whose.
            min_version: the lowest that will do.
            version: exactly this one is wanted; None where it is not there (yet, or any more).

        Raises:
            CheckpointError: the version's file is damaged, or something else.
        """
        while True:  # again only where the version was overwritten, or removed, since
            there = self.versions(policy_id)
            wanted = max(there, default=-1) if version is None else version
            if wanted not in there or wanted < min_version:
                return None
            found = self._read(policy_id, wanted)
            if found is not None:
                return StoredParams(wanted, found[0], json.loads(found[1]))

    def pin(self, policy_id: str) -> int:
        """Has the newest version kept until `unpin`, however many come after it, and returns it; -1: there is none.

        For an evaluation, which is of exactly one version. Of more than `PINS` pins the oldest is let go of.
        """
        with self._writing(policy_id):
            there = self._there(policy_id)
            newest = max(there, default=-1)
            if newest >= 0:
                others = [version for version, pinned in there.items() if pinned and version != newest]
                for version in others[: 1 - PINS or None]:
                    self._set_pinned(policy_id, version, False)
                self._set_pinned(policy_id, newest, True)
                self._drop_old(policy_id)
        return newest

    def unpin(self, policy_id: str, version: int) -> None:
        """Lets go of a pinned version. Of one that is not pinned it changes nothing."""
        with self._writing(policy_id):
            if self._there(policy_id).get(version):
                self._set_pinned(policy_id, version, False)
                self._drop_old(policy_id)

    def versions(self, policy_id: str) -> list[int]:
        """The versions that can be had, in order: the newest `kept`, and those that are pinned."""
        there = self._there(policy_id)
        newest = list(there)[-self.kept :]
        return [version for version, pinned in there.items() if pinned or version in newest]

    def newest(self, policy_id: str) -> int:
        """The newest version; -1 where there is none."""
        return max(self._there(policy_id), default=-1)

    def wait_for_version(self, policy_id: str, known: int, timeout: float) -> int:
        """The newest version, as soon as it is above `known`, or after `timeout` seconds (1 at most).

        Raises:
            StoppedError: the store was closed.
        """
        deadline = time.monotonic() + min(timeout, LONGEST_WAIT)
        while True:
            seen = self._change()
            newest, left = self.newest(policy_id), deadline - time.monotonic()
            if newest > known:
                return newest
            if self._closed:
                raise StoppedError(f"The param store was closed while a version of {policy_id!r} was waited for.")
            if left <= 0:
                return newest
            self._wait(seen, left)

    def source(self, policy_id: str) -> PolicySource:
        """What an Inferencer of this policy takes as its `learner`."""
        self._check_policy(policy_id)
        return PolicySource(self, policy_id)

    @property
    def has_gone(self) -> bool:
        """Whether nothing will come any more, and what is there may be old."""
        return self._closed

    @abc.abstractmethod
    def close(self) -> None:
        """Nothing is put any more, and what waits ends. May be called again."""

    # What a kind of store says:

    _closed: bool

    @abc.abstractmethod
    def _check_policy(self, policy_id: str) -> None:
        """Raises `UsageError` for a policy that this store cannot hold."""

    @abc.abstractmethod
    def _writing(self, policy_id: str) -> contextlib.AbstractContextManager[Any]:
        """Held by one thread of all processes at a time; raises PeerError after `LOCK_TIMEOUT`."""

    @abc.abstractmethod
    def _set_opened(self, policy_id: str, attempt: Attempt) -> None:
        """Sets what `opened` gives. The caller holds the right to write, as in all that follows; it may die here."""

    @abc.abstractmethod
    def _there(self, policy_id: str) -> dict[int, bool]:
        """All versions that are there whole, in order, and whether each is pinned. Anybody may ask."""

    @abc.abstractmethod
    def _set_pinned(self, policy_id: str, version: int, pinned: bool) -> None:
        """Pins a version, or lets go of it."""

    def _prepare(self, policy_id: str, version: int, packed: PackedParams, hparams: bytes) -> Any:
        """What `_write` is given: whatever takes time and needs no right to write is done here."""
        return packed, hparams

    @abc.abstractmethod
    def _write(self, policy_id: str, version: int, prepared: Any) -> None:
        """Writes a version; whole, or it is none. Who is killed here keeps nobody from the next."""

    @abc.abstractmethod
    def _read(self, policy_id: str, version: int) -> tuple[PackedParams, bytes] | None:
        """(the reader's own parameters, hparams); None where the version is not there any more. Anybody may."""

    def _drop_old(self, policy_id: str) -> None:  # noqa: B027
        """Frees what `versions` does not name."""

    def _change(self) -> int:
        """What `_wait` is to be given: read before looking at what is waited for."""
        return 0

    def _wait(self, seen: int, seconds: float) -> None:
        """Waits for a change since `_change` gave `seen`, or a while."""
        time.sleep(min(seconds, _LOOK))

    def _wake(self) -> None:  # noqa: B027
        """Ends `_wait`."""


class PolicySource:
    """The versions of one policy, as a `PackedSource`; picklable where its store is.

    Attributes:
        store: that they lie in.
    """

    def __init__(self, store: ParamStore, policy_id: str) -> None:
        self.store, self._policy_id = store, policy_id

    def __reduce__(self) -> tuple[Any, ...]:
        return _policy_source, (pickle.dumps(self.store), self._policy_id)

    def get_packed(self, known_version: int = -1) -> tuple[int, PackedParams | None]:
        """See `PackedSource`; (-1, None) before the first version."""
        newest = self.store.newest(self._policy_id)
        found = None if newest == known_version else self.store.get(self._policy_id)
        return (found.version, found.packed) if found is not None else (newest, None)

    def get_params(self, known_version: int = -1) -> tuple[int, Tree | None]:
        """See `ParamSource`."""
        return unpacked(self.get_packed(known_version))

    def wait_for_version(self, known_version: int, timeout: float) -> int:
        """See `ParamSource`."""
        return self.store.wait_for_version(self._policy_id, known_version, timeout)


def _policy_source(pickled: bytes, policy_id: str) -> PolicySource:
    return PolicySource(pickle.loads(pickled), policy_id)


def check_attempt(policy_id: str, attempt: Attempt | None, opened: Attempt | None) -> None:
    """Raises `FencedError` where `attempt` is older than the one that has `opened` the policy; None is the oldest."""
    if opened is None or (attempt is not None and attempt >= opened):
        return
    whose = f"attempt {opened.number} of epoch {opened.epoch}"
    if attempt is None:
        raise FencedError(
            f"Policy {policy_id!r} was opened by {whose}, and is put by that alone. Who puts it by hand opens "
            "it first, with a newer Attempt, and puts with that."
        )
    raise FencedError(
        f"Attempt {attempt.number} of epoch {attempt.epoch} is fenced off: policy {policy_id!r} was opened by {whose}, "
        "which goes on. If nobody does, the clock was set back since that epoch (milliseconds of Unix time): use "
        "another directory for the param store."
    )


def overdue(where: str = "") -> Exception:
    """The error of who waited `LOCK_TIMEOUT` for the right to write."""
    return PeerError(
        f"Another process has been putting parameters{where} for {LOCK_TIMEOUT:g} s: it was stopped (SIGSTOP) "
        "meanwhile. Let it go on, or kill it."
    )


def _encode(policy_id: str, hparams: dict[str, Any] | None) -> bytes:
    if hparams is None:
        return b"null"
    try:
        encoded = json.dumps(hparams).encode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"The hparams of policy {policy_id!r} must be plain numbers and words: {error}.") from None
    if len(encoded) > HPARAMS_BYTES:
        raise UsageError(
            f"The hparams of policy {policy_id!r} take {len(encoded)} bytes as JSON, {HPARAMS_BYTES} at most are kept: "
            "arrays belong into the parameters."
        )
    return encoded
