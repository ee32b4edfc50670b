"""Where policies lie: parameters under rising versions, put by a learner and fetched by whoever acts.

`param_store_shared.py` keeps them in memory that the processes of one machine share, `param_store_files.py` in files.
"""

from __future__ import annotations

import abc
import json
from typing import Any, NamedTuple

from rlframe.errors import FencedError, UsageError
from rlframe.types import Tree

HPARAMS_BYTES = 16 * 1024  # of a version's hyper-parameters, at most, as JSON
PINS = 2  # versions of a policy that can be pinned at once
LONGEST_WAIT = 1.0  # seconds, as for `Learner.wait_for_version`


class StoredParams(NamedTuple):
    """One version of a policy."""

    version: int
    params: Tree  # of numpy arrays, which are the caller's own
    hparams: dict[str, Any] | None  # what was put with them


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

    Attributes:
        kept: how many versions of each policy there are, the newest ones.
    """

    kept: int

    @abc.abstractmethod
    def open(self, policy_id: str, attempt: Attempt) -> None:
        """From now on only this attempt puts, until a newer one does the same. May be said again.

        Raises:
            FencedError: a newer one has.
        """

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
        params: Tree,
        hparams: dict[str, Any] | None = None,
        *,
        attempt: Attempt | None = None,
    ) -> None:
        """Makes `params` the newest version of a policy, and lets go of the one that is `kept` versions before it.

        Args:
            policy_id: whose.
            version: from 0, above all that were put before.
            params: a tree of arrays; device arrays are fetched.
            hparams: what belongs to them, as JSON can say it; `HPARAMS_BYTES` at most.
            attempt: whose they are; needed where the policy was opened.

        Raises:
            FencedError: a newer attempt has opened the policy. Nothing is changed.
            UsageError: the version is not above the newest; or what is put cannot be.
        """
        if version < 0:
            raise UsageError(f"Versions of a policy start at 0, got {version} for {policy_id!r}.")
        self._put(policy_id, version, params, _encode(policy_id, hparams), attempt)

    @abc.abstractmethod
    def _put(self, policy_id: str, version: int, params: Tree, hparams: bytes, attempt: Attempt | None) -> None:
        """As `put`, which has checked."""

    @abc.abstractmethod
    def get(self, policy_id: str, min_version: int = -1, *, version: int | None = None) -> StoredParams | None:
        """The newest version; None where there is none, or only ones below `min_version`.

        Args:
            policy_id: whose.
            min_version: the lowest that will do.
            version: exactly this one is wanted; None where it is not there (yet, or any more).
        """

    @abc.abstractmethod
    def pin(self, policy_id: str) -> int:
        """Has the newest version kept until `unpin`, however many come after it, and returns it; -1: there is none.

        For an evaluation, which is of exactly one version. Of more than `PINS` pins the oldest is let go of.
        """

    @abc.abstractmethod
    def unpin(self, policy_id: str, version: int) -> None:
        """Lets go of a pinned version. Of one that is not pinned it changes nothing."""

    @abc.abstractmethod
    def versions(self, policy_id: str) -> list[int]:
        """The versions that can be had, in order: the newest `kept`, and those that are pinned."""

    def newest(self, policy_id: str) -> int:
        """The newest version; -1 where there is none."""
        return max(self.versions(policy_id), default=-1)

    @abc.abstractmethod
    def wait_for_version(self, policy_id: str, known: int, timeout: float) -> int:
        """The newest version, as soon as it is above `known`, or after `timeout` seconds (1 at most).

        Raises:
            StoppedError: the store was closed.
        """

    def source(self, policy_id: str) -> ParamSource:
        """What an Inferencer of this policy takes as its `learner`."""
        self._check_policy(policy_id)
        return ParamSource(self, policy_id)

    @abc.abstractmethod
    def _check_policy(self, policy_id: str) -> None:
        """Raises `UsageError` for a policy that this store cannot hold."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends what waits. May be called again."""


class ParamSource:
    """The versions of one policy, asked for as a Learner is; picklable where its store is."""

    def __init__(self, store: ParamStore, policy_id: str) -> None:
        self._store, self._policy_id = store, policy_id

    def get_params(self, known_version: int = -1) -> tuple[int, Tree | None]:
        """(newest version, its tree), or (it, None) where that is `known_version`; (-1, None) before the first."""
        if self._store.newest(self._policy_id) <= known_version:
            return known_version, None
        found = self._store.get(self._policy_id)
        return (found.version, found.params) if found is not None else (known_version, None)

    def wait_for_version(self, known_version: int, timeout: float) -> int:
        """The newest version, as soon as it is above `known_version`, or after `timeout` seconds (1 at most)."""
        return self._store.wait_for_version(self._policy_id, known_version, timeout)


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


def check_rises(policy_id: str, version: int, newest: int) -> None:
    """Raises `UsageError` where `version` cannot follow `newest`."""
    if version <= newest:
        raise UsageError(
            f"Version {version} of policy {policy_id!r} was put, but version {newest} is there already: versions only "
            f"rise. A learner that is restarted publishes above {newest}."
        )


def _encode(policy_id: str, hparams: dict[str, Any] | None) -> bytes:
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
