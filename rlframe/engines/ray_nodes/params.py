"""Transfer of parameters between Ray nodes: each version is stored in Ray once, and each Ray node fetches it once.

For each version, the host of a learner calls the learner once, and sends a reference to the hosts that have
subscribed. So the learner's work per version does not grow with the number of actors. In the topology elastic, the
param store takes the learner's place. Inferencers on the learner's Ray node read shared memory, as under every engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from rlframe import extras
from rlframe.errors import RlframeError, UnavailableError
from rlframe.params.publication import LONGEST_WAIT
from rlframe.transport import base
from rlframe.transport.base import CALL_TIMEOUT
from rlframe.transport.sockets import SocketClient

with extras.explain_import_error("--engine ray", "ray"):
    import ray

_RESUBSCRIBE_INTERVAL = 5.0  # seconds between two subscriptions of a host to the same node
_FIRST_VERSION_TIMEOUT = 1.0  # seconds to wait for the first version, before a call goes to the node itself

Offer = Callable[[int, list[Any]], None]  # callback (version, [object reference])
Policy = tuple[str, ...]  # the first arguments of each call: () for a learner, (policy_id,) for a param store


class PublishedVersions:
    """Publishes parameter versions to other hosts. Runs in the host of the node that has the parameters.

    Args:
        client: client of the node, which is a `PackedSource`.
        policy: see `Policy`.
    """

    def __init__(self, client: SocketClient, policy: Policy) -> None:
        self._client, self._policy = client, policy
        self._lock = threading.Lock()
        self._offers: dict[str, Offer] = {}  # by subscriber
        self._newest: tuple[int, list[Any]] | None = None
        self._thread: threading.Thread | None = None
        self._over = False

    def subscribe(self, subscriber: str, offer: Offer) -> None:
        """Call `offer` with the newest version now, and with each later version. Repeated calls are allowed."""
        with self._lock:
            self._offers[subscriber] = offer
            if self._newest is not None:
                offer(*self._newest)
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="rlframe parameters", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop publishing. The node has ended."""
        self._over = True

    def _follow(self) -> None:
        known = -1
        while not self._over:
            try:
                version = self._client.call("wait_for_version", *self._policy, known, LONGEST_WAIT)
                if version > known:
                    # The node may return newer parameters than `version`. The next loop publishes them again under
                    # their own version number, but readers that already have them do not fetch them again.
                    parts = self._client.exchange(base.pack(("get_packed", (*self._policy, -1), {})))
                    self._publish(version, ray.put(parts))
                    known = version
            except UnavailableError:
                time.sleep(0.1)
            except RlframeError:  # the node has no parameters, publishes no versions, or is stopping
                break
        with self._lock:
            self._thread = None  # the next `subscribe` starts a new thread

    def _publish(self, version: int, reference: Any) -> None:
        with self._lock:
            self._newest = version, [reference]
            for offer in self._offers.values():
                offer(*self._newest)


class FetchedVersions:
    """Receives and fetches parameter versions. Runs on the other Ray nodes, which do not have the parameters.

    Args:
        subscribe: function (host) that subscribes to a host. Then the host sends each version to `take`.
    """

    def __init__(self, subscribe: Callable[[Any], None]) -> None:
        self._subscribe = subscribe
        self._host: Any = None
        self._asked_at = 0.0
        self._changed = threading.Condition()
        self._fetching = threading.Lock()
        self._version, self._references = -1, list[Any]()
        self._fetched: tuple[int, base.Parts] = (-1, [])

    def take(self, version: int, references: list[Any]) -> None:
        """Receive the reference to a version in Ray's object store."""
        with self._changed:
            self._version, self._references = version, references
            self._changed.notify_all()

    def answer(self, host: Any, method: str, known: int, timeout: float = 0.0) -> Any:
        """Answer a call of `wait_for_version` or `get_packed` from the known versions.

        Args:
            host: the Ray actor of the node that has the parameters.
            method: "wait_for_version" or "get_packed".
            known: the version that the caller already has.
            timeout: maximum seconds that `wait_for_version` waits.

        Returns:
            The result of `wait_for_version`, or the packed result of `get_packed`. None means that no version has
            arrived, and that the caller must call the node itself.

        Raises:
            UnavailableError: the version could not be fetched.
        """
        now = time.monotonic()
        if host is not self._host or now > self._asked_at + _RESUBSCRIBE_INTERVAL:
            is_new, self._host, self._asked_at = host is not self._host, host, now
            self._subscribe(host)
            if is_new:
                with self._changed:
                    self._changed.wait_for(lambda: self._version >= 0, _FIRST_VERSION_TIMEOUT)
        with self._changed:
            if self._version < 0:
                return None
            if method == "wait_for_version":
                self._changed.wait_for(lambda: self._version > known, min(timeout, LONGEST_WAIT))
                return self._version
            version, references = self._version, self._references
        # If the caller has the newest version, return no parameters.
        return base.pack(((known, None),)) if version <= known else self._fetch(version, references)

    def _fetch(self, version: int, references: list[Any]) -> base.Parts:
        with self._fetching:
            if self._fetched[0] != version:
                try:
                    self._fetched = version, ray.get(references[0], timeout=CALL_TIMEOUT)
                except ray.exceptions.RayError as error:
                    raise UnavailableError(f"version {version} did not arrive: {type(error).__name__}") from None
            return self._fetched[1]
