"""The param store of the elastic topology: the newest parameters, in a process that outlives the learner.

The learner puts each version, and collectors and evaluators read it. The newest versions and those that are pinned for
an evaluation survive the learner. A replaced learner is fenced off: it cannot put versions any more.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import threading
from typing import Any, NamedTuple

import jax
import numpy as np

from rlframe.errors import FencedError, StoppedError, UsageError
from rlframe.handles import Remote, stop_with_program
from rlframe.params.packing import PackedParams
from rlframe.params.publication import LONGEST_WAIT, Publication, PublicationReader
from rlframe.transport import Server
from rlframe.transport.sockets import SocketTransport
from rlframe.types import Tree

_PINS = 2  # maximum number of pinned versions of a policy
_REMOTE_METHODS = (
    *("open_policy", "check_not_fenced", "put", "get", "pin", "unpin", "versions", "newest_version"),
    *("get_packed", "wait_for_version", "publication_reader", "finish"),
)


class StoredParams(NamedTuple):
    """One version of a policy."""

    version: int
    packed: PackedParams
    hparams: dict[str, Any] | None  # hyperparameters that were put with the parameters

    @property
    def params(self) -> Tree:
        """The parameters as a tree of writable numpy arrays."""
        return jax.tree.map(lambda leaf: leaf if leaf.flags.writeable else leaf.copy(), self.packed.unpack_numpy())


class Attempt(NamedTuple):
    """Identifies an attempt of a learner to train a policy. After a greater attempt, smaller attempts are refused."""

    epoch: int  # start time of the task in Unix milliseconds; each task counts its attempts from 0
    number: int  # number of the attempt at the task


@dataclasses.dataclass
class _Policy:
    attempt: Attempt | None = None  # the newest attempt that opened the policy
    put_by: Attempt | None = None  # the attempt that put the newest version
    versions: dict[int, StoredParams] = dataclasses.field(default_factory=dict)  # versions in ascending order
    pinned: list[int] = dataclasses.field(default_factory=list)  # pinned versions, oldest pin first
    publication: Publication | None = None  # publication of the newest version; None before the first version


class ParamStore:
    """A store of the newest versions of each policy. Thread-safe.

    The store is a node of a program, or an object in the process that creates it. It pickles as a handle, through which
    other processes of this machine call it.

    The version numbers of a policy only rise. A learner that opens a policy (`open_policy`) fences off all older
    attempts. Any caller may put versions of a policy that no learner has opened.

    Args:
        kept: Number of versions to keep for each policy, in addition to the pinned versions.
        at_end: Seconds that `run` continues after the end of the program, so that the learner can put its last
            version. A call of `finish` ends `run` earlier.
    """

    def __init__(self, kept: int = 4, at_end: float = 0.0) -> None:
        if kept < 1:
            raise UsageError(f"A ParamStore must keep at least one version, got kept={kept}.")
        self._kept, self._at_end = kept, at_end
        self._changed = threading.Condition()
        self._policies: dict[str, _Policy] = collections.defaultdict(_Policy)
        # `_is_stopping` starts the last `at_end` seconds of `run`. `_finished` ends `run` at once. `_closed` ends all
        # calls that wait.
        self._is_stopping, self._finished, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._server: Server | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a handle. At the first time, start the server that all handles call."""
        transport = SocketTransport()
        with self._changed:
            if self._server is None:
                self._server = transport.serve({name: getattr(self, name) for name in _REMOTE_METHODS})
        return Remote([self._server.address], "param store", transport=transport).__reduce__()

    # --- for the learner

    def open_policy(self, policy_id: str, attempt: Attempt) -> None:
        """Accept versions only from this attempt, until a newer attempt opens the policy.

        Raises:
            FencedError: A newer attempt has opened the policy.
        """
        with self._changed:
            _check_attempt(policy_id, attempt, self._policies[policy_id].attempt)
            self._policies[policy_id].attempt = attempt

    def check_not_fenced(self, policy_id: str, attempt: Attempt | None) -> None:
        """Raise `FencedError` if a newer attempt has opened the policy. Learners check this before each checkpoint."""
        with self._changed:
            _check_attempt(policy_id, attempt, self._policies[policy_id].attempt)

    def put(
        self,
        policy_id: str,
        version: int,
        params: Tree | PackedParams,
        hparams: dict[str, Any] | None = None,
        *,
        attempt: Attempt | None = None,
    ) -> None:
        """Make `params` the newest version of a policy. A repeated call of the same attempt changes nothing.

        Args:
            policy_id: The policy.
            version: Version number, at least 0 and above all earlier versions.
            params: A tree of arrays, or packed parameters as returned by `Learner.get_packed`.
            hparams: Hyperparameters of the policy, as JSON values.
            attempt: The learner's attempt. Required once the policy has been opened.

        Raises:
            FencedError: A newer attempt has opened the policy.
            StoppedError: The store was closed.
            UsageError: The version is not above the newest version, the tree differs from the trees of earlier
                versions, or the hyperparameters are not JSON values.
        """
        if version < 0:
            raise UsageError(f"Versions of a policy start at 0, got {version} for {policy_id!r}.")
        _check_hparams(policy_id, hparams)
        given = params if isinstance(params, PackedParams) else PackedParams.of(params)
        packed = PackedParams(given.packing, [np.array(array) for array in given.arrays])
        for array in packed.arrays:
            array.flags.writeable = False
        with self._changed:
            if self._closed.is_set():
                raise StoppedError(f"The param store was closed before version {version} of {policy_id!r} was put.")
            policy = self._policies[policy_id]
            _check_attempt(policy_id, attempt, policy.attempt)
            newest = max(policy.versions, default=-1)
            if version == newest and attempt is not None and attempt == policy.put_by:
                return
            if version <= newest:
                raise UsageError(
                    f"Version {version} of policy {policy_id!r} is not above the newest version {newest}. Versions "
                    f"must rise: a restarted learner must publish above {newest}."
                )
            if policy.publication is None:
                policy.publication = Publication(version, packed)
            elif packed.packing != policy.versions[newest].packed.packing:
                raise UsageError(_difference(policy.versions[newest].packed.packing.template, packed.packing.template))
            else:
                policy.publication.publish(version, packed)
            policy.versions[version] = StoredParams(version, packed, hparams)
            policy.put_by = attempt
            policy.attempt = attempt or policy.attempt  # a restarted store has lost its attempt
            self._drop_old(policy)
            self._changed.notify_all()

    # --- for collectors and evaluators

    def get(self, policy_id: str, min_version: int = -1, *, version: int | None = None) -> StoredParams | None:
        """Return `version`, by default the newest. Return None if that version is missing or below `min_version`."""
        with self._changed:
            versions = self._policies[policy_id].versions
            wanted = max(versions, default=-1) if version is None else version
            return versions.get(wanted) if wanted >= min_version else None

    def get_packed(self, policy_id: str, known_version: int = -1) -> tuple[int, PackedParams | None]:
        """See `PackedSource.get_packed`. Return (-1, None) before the first version."""
        publication = self._policies[policy_id].publication
        return publication.get_packed(known_version) if publication is not None else (-1, None)

    def wait_for_version(self, policy_id: str, known_version: int, timeout: float) -> int:
        """See `ParamSource.wait_for_version`.

        Raises:
            StoppedError: The store was closed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed.is_set() or self.newest_version(policy_id) > known_version,
                min(timeout, LONGEST_WAIT),
            )
            newest = self.newest_version(policy_id)
        if self._closed.is_set() and newest <= known_version:
            raise StoppedError(f"The param store was closed while a caller waited for a version of {policy_id!r}.")
        return newest

    def publication_reader(self, policy_id: str) -> PublicationReader | None:
        """See `Learner.publication_reader`. Return None before the first version."""
        publication = self._policies[policy_id].publication
        return publication.reader() if publication is not None else None

    # --- for evaluations of one version

    def pin(self, policy_id: str) -> int:
        """Pin the newest version. Return its number, or -1 if no version exists.

        A policy has at most two pinned versions. A third pin removes the oldest pin.
        """
        with self._changed:
            policy = self._policies[policy_id]
            newest = max(policy.versions, default=-1)
            if newest >= 0 and newest not in policy.pinned:
                policy.pinned = [*policy.pinned[1 - _PINS :], newest]
                self._drop_old(policy)
            return newest

    def unpin(self, policy_id: str, version: int) -> None:
        """Unpin a version, so that it can be dropped. Do nothing if the version is not pinned."""
        with self._changed:
            policy = self._policies[policy_id]
            policy.pinned = [pinned for pinned in policy.pinned if pinned != version]
            self._drop_old(policy)

    def versions(self, policy_id: str) -> list[int]:
        """Return the stored versions, in ascending order."""
        return list(self._policies[policy_id].versions)

    def newest_version(self, policy_id: str) -> int:
        """Return the number of the newest version, or -1 if no version exists."""
        return max(self.versions(policy_id), default=-1)

    def _drop_old(self, policy: _Policy) -> None:
        newest = list(policy.versions)[-self._kept :]
        for version in [*policy.versions]:
            if version not in newest and version not in policy.pinned:
                del policy.versions[version]

    # --- methods of a program's node

    def run(self) -> None:
        """Wait until `finish` is called, or until `at_end` seconds have passed after `stop` or the program's end."""
        with stop_with_program(self._is_stopping.set):
            self._is_stopping.wait()
            self._finished.wait(self._at_end)

    def stop(self) -> None:
        """End `run` after at most `at_end` seconds, as at the end of the program. Any thread can call this method."""
        self._is_stopping.set()

    def finish(self) -> None:
        """End `run` at once, because no worker needs the store any more."""
        self._finished.set()
        self._is_stopping.set()

    def close(self) -> None:
        """Stop the server, refuse new versions, and end all calls that wait. Repeated calls change nothing."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
            server, self._server = self._server, None
        for policy in list(self._policies.values()):
            if policy.publication is not None:
                policy.publication.close()
        if server is not None:
            server.stop()


def _check_attempt(policy_id: str, attempt: Attempt | None, opened: Attempt | None) -> None:
    """Raise `FencedError` if `attempt` is older than `opened`, the attempt that opened the policy.

    If `attempt` is None, it counts as older than every attempt.
    """
    if opened is None or (attempt is not None and attempt >= opened):
        return
    whose = f"attempt {opened.number} of epoch {opened.epoch}"
    if attempt is None:
        raise FencedError(
            f"Policy {policy_id!r} was opened by {whose}, and only that attempt may put versions. To put a version "
            "from another program, open the policy with a newer Attempt and pass that Attempt to put."
        )
    raise FencedError(
        f"Attempt {attempt.number} of epoch {attempt.epoch} is fenced off: policy {policy_id!r} was opened by {whose}, "
        "which continues."
    )


def _check_hparams(policy_id: str, hparams: dict[str, Any] | None) -> None:
    try:
        json.dumps(hparams)
    except (TypeError, ValueError) as error:
        raise UsageError(f"The hparams of policy {policy_id!r} must be JSON values: {error}.") from None


def _difference(expected: Tree, came: Tree) -> str:
    """Describe how a tree differs from the trees of earlier versions."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(expected)
    others, given = jax.tree.flatten(came)
    if given != treedef:
        return f"The tree of the new parameters differs from earlier versions: got {given}, expected {treedef}."
    path, leaf, other = next((path, leaf, other) for (path, leaf), other in zip(leaves, others) if leaf != other)
    return (
        f"The new parameters{jax.tree_util.keystr(path)} are {other.dtype}{list(other.shape)}; those of earlier "
        f"versions are {leaf.dtype}{list(leaf.shape)}."
    )
