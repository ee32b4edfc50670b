"""Read a `ParamSource` from any process (`ParamReader`), and follow its versions (`Refresher`)."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from rlframe import handles
from rlframe.errors import NoMethodError, PeerError, StoppedError, UnavailableError, UsageError
from rlframe.handles import Remote
from rlframe.params.packing import PackedParams
from rlframe.params.publication import LONGEST_WAIT, PublicationReader
from rlframe.types import Tree

_log = logging.getLogger(__name__)

_POLL_INTERVAL = 0.02  # seconds between two polls of a source that has no `wait_for_version`
_MAX_WAIT = 0.2  # maximum seconds that `Refresher.follow` waits for a newer version in one call


class ParamSource(Protocol):
    """A source of parameters whose versions increase: a Learner, a policy of a param store, or your own object.

    Several inferencers may call a source, from any thread. The source returns a copy of the parameters, because the
    learner continues to train them.
    """

    def get_params(self, known_version: int = -1) -> tuple[int, Tree | None]:
        """Return (newest version, its tree of numpy arrays). The tree is None if `known_version` is the newest."""

    def wait_for_version(self, known_version: int, timeout: float) -> int:
        """Wait until there is a version above `known_version`, or for `timeout` seconds (1 at most).

        Return the newest version. This method is optional: if a source does not have it, inferencers poll `get_params`.
        Only inferencers of on-policy agents call it.
        """


class PackedSource(ParamSource, Protocol):
    """A source that packs each version only once, for all inferencers."""

    def get_packed(self, known_version: int = -1) -> tuple[int, PackedParams | None]:
        """Return the same result as `get_params`, but with packed parameters instead of the tree."""


def as_packed_source(source: Any) -> PackedSource:
    """Return a `PackedSource` that reads from `source`: an object with `get_params`, or a `Remote` of such an object.

    Raises:
        UsageError: the object has no `get_params`.
    """
    if hasattr(source, "get_packed") and not isinstance(source, Remote):  # a `Remote` appears to have every method
        return source
    if not callable(getattr(source, "get_params", None)):
        raise UsageError(
            f"A {type(source).__name__} cannot be the learner of an Inferencer: it needs get_params(known_version) "
            "-> (version, tree or None), as a Learner has."
        )
    return ParamReader(source)


class ParamReader:
    """A `PackedSource` for a learner, for one policy of a `ParamStore`, or for an object that only has `get_params`.

    The reader uses shared memory if the peer is in another process of this machine. Otherwise it calls the peer.

    If the memory is gone, or its versions are older than the caller's version, the peer was restarted. The reader then
    calls the peer once, and looks for the peer's new memory at the next call. A reader can be pickled.

    Args:
        peer: the learner, the store or the object with `get_params`, or a `Remote` of such an object.
        policy_id: the policy to read, if the peer is a store.
    """

    def __init__(self, peer: Any, policy_id: str | None = None) -> None:
        self._peer = peer
        # First arguments of the peer's methods: the policy for a store, nothing for a learner.
        self._policy = (policy_id,) if policy_id is not None else ()
        self._memory: PublicationReader | None = None
        self._should_find_memory = isinstance(peer, Remote)
        # A `Remote` appears to have every method. A call of a missing method raises NoMethodError.
        self._has_get_packed, self._has_wait = hasattr(peer, "get_packed"), hasattr(peer, "wait_for_version")

    def __reduce__(self) -> tuple[Any, ...]:
        return ParamReader, (self._peer, *self._policy)

    def get_packed(self, known_version: int = -1) -> tuple[int, PackedParams | None]:
        """See `PackedSource`. Raises the errors of `Remote`."""
        version, packed = self._read_memory(known_version) or self._call(known_version)
        if version < 0:  # a store without a version shares no memory: try again later
            self._should_find_memory = isinstance(self._peer, Remote)
        return version, packed

    def get_params(self, known_version: int = -1) -> tuple[int, Tree | None]:
        """See `ParamSource`."""
        version, packed = self.get_packed(known_version)
        return version, None if packed is None else packed.unpack_numpy()

    def wait_for_version(self, known_version: int, timeout: float) -> int:
        """See `ParamSource`. If the peer lacks this method, poll its `get_params`."""
        try:
            if self._has_wait:
                return self._peer.wait_for_version(*self._policy, known_version, timeout)
        except NoMethodError:
            self._has_wait = False
        deadline = time.monotonic() + min(timeout, LONGEST_WAIT)
        while True:
            version, _ = self._peer.get_params(*self._policy, known_version)
            if version > known_version or time.monotonic() >= deadline:
                return version
            time.sleep(_POLL_INTERVAL)

    def _read_memory(self, known_version: int) -> tuple[int, PackedParams | None] | None:
        """Return the result of `get_packed`, or None if the peer shares no memory or was restarted."""
        if self._should_find_memory:
            self._memory, self._should_find_memory = self._find_memory(), False
        if self._memory is None:
            return None
        newest = None if self._memory.is_gone else self._memory.read(known_version)
        if newest is None:
            self._memory, self._should_find_memory = None, True
        return newest

    def _find_memory(self) -> PublicationReader | None:
        try:
            found = self._peer.publication_reader(*self._policy)
        except NoMethodError:  # the peer is not a Learner
            return None
        try:
            return None if found is None or found.is_gone else found
        except (UnavailableError, UsageError):  # the peer is on another machine or Ray node, or belongs to another user
            return None

    def _call(self, known_version: int) -> tuple[int, PackedParams | None]:
        try:
            if self._has_get_packed:
                return self._peer.get_packed(*self._policy, known_version)
        except NoMethodError:
            self._has_get_packed = False
        version, params = self._peer.get_params(*self._policy, known_version)
        return version, None if params is None else PackedParams.of(params)


class Refresher:
    """Fetches a learner's parameters for an inferencer, once or continuously.

    Args:
        learner: a `ParamSource`, or a handle to a node that is a `ParamSource`. A handle is resolved at the first call.
        current_version: function that returns the inferencer's version, or -1 if the inferencer has no version.
        on_newer: called with (version, packed parameters) for each newer version.
        deadline: seconds without an answer after which a call of a learner in another process fails.
        stop: an event that ends `follow` and every wait for the learner.

    Attributes:
        last_answer_at: `time.monotonic()` of the learner's last answer; None if the learner has never answered.
        problem: the reason why the learner does not answer; empty if the learner answers.
    """

    def __init__(
        self,
        learner: ParamSource | Any,
        current_version: Callable[[], int],
        on_newer: Callable[[int, PackedParams], None],
        deadline: float,
        stop: threading.Event,
    ) -> None:
        self._learner_or_handle = learner
        self._current_version, self._on_newer = current_version, on_newer
        self._deadline, self._stop = deadline, stop
        self.last_answer_at: float | None = None
        self.problem = ""

    @functools.cached_property
    def _learner(self) -> PackedSource:
        learner, deadline = self._learner_or_handle, self._deadline
        return as_packed_source(handles.resolve(learner, "learner", deadline=deadline, stop=self._stop))

    def refresh(self) -> None:
        """Fetch the learner's newest version if it differs from the inferencer's version.

        Raises:
            PeerError: a learner in another process did not answer within `deadline`.
            StoppedError: `stop` was set, or the program ended, before the learner answered.
        """
        version, packed = self._learner.get_packed(self._current_version())
        self.last_answer_at, self.problem = time.monotonic(), ""
        if packed is not None:
            self._on_newer(version, packed)

    def wait_for_version(self, known_version: int, timeout: float) -> int:
        """See `ParamSource`. Raises the same errors as `refresh`."""
        return self._learner.wait_for_version(known_version, timeout)

    def follow(self, interval: float, *, waits: bool = False, required: bool = True) -> None:
        """Call `refresh` every `interval` seconds until `stop` is set, or the program ends.

        While the learner is unreachable, the inferencer keeps its version.

        Args:
            waits: if True, wait until there is a newer version, instead of for `interval` seconds.
            required: if True, raise an error if the inferencer has no parameters and no learner answers.

        Raises:
            PeerError: no learner answered within `deadline`, and the inferencer has no parameters.
        """
        while not self._stop.is_set():
            try:
                if waits:
                    self.wait_for_version(self._current_version(), _MAX_WAIT)
                self.refresh()
            except StoppedError:
                return
            except PeerError as error:
                known, self.problem = self._current_version(), str(error)
                if required and known < 0:
                    raise
                newest = f"version {known} of the parameters" if known >= 0 else "its own parameters"
                _log.warning("Inference continues with %s: %s", newest, error)
            if not waits:
                self._stop.wait(interval)
