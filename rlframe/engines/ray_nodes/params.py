"""Parameters between Ray nodes: put into Ray's object store once per version, and fetched once by each Ray node.

The host beside a learner, or beside elastic's param store, asks it once for each version and offers the reference to
the hosts that subscribed. So a learner's work per version does not grow with the number of actors. On the learner's own
Ray node, inferencers read shared memory, as under every engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from rlframe import extras
from rlframe.errors import RlframeError, UnavailableError
from rlframe.params.source import LONGEST_WAIT
from rlframe.transport import messages
from rlframe.transport.base import CALL_TIMEOUT
from rlframe.transport.sockets import SocketClient

with extras.explain_import_error("--engine ray", "ray"):
    import ray

_AGAIN = 5.0  # seconds after which a host that wants versions says so again
_FIRST = 1.0  # seconds that the first version is waited for, before the node itself is asked

Offer = Callable[[int, list[Any]], None]  # a version, and [the reference to it]
Policy = tuple[str, ...]  # the first arguments of each call: () of a learner, (policy_id,) of a param store


class PublishedVersions:
    """The publisher's side, beside the node that has the versions.

    Args:
        client: of the node, a `PackedSource`.
        policy: see `Policy`.
    """

    def __init__(self, client: SocketClient, policy: Policy) -> None:
        self._client, self._policy = client, policy
        self._lock = threading.Lock()
        self._wanted: dict[str, Offer] = {}  # by subscriber
        self._newest: tuple[int, list[Any]] | None = None
        self._thread: threading.Thread | None = None
        self._over = False

    def subscribe(self, who: str, offer: Offer) -> None:
        """Offer each version from now on, and the newest at once. May be called again."""
        with self._lock:
            self._wanted[who] = offer
            if self._newest is not None:
                offer(*self._newest)
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="rlframe parameters", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop: the node has ended."""
        self._over = True

    def _follow(self) -> None:
        known = -1
        while not self._over:
            try:
                version = self._client.call("wait_for_version", *self._policy, known, LONGEST_WAIT)
                if version > known:
                    # The answer may be newer still. Then it is offered again under its own number, and not fetched.
                    parts = self._client.exchange(messages.pack(("get_packed", (*self._policy, -1), {})))
                    self._publish(version, ray.put(parts))
                    known = version
            except UnavailableError:
                time.sleep(0.1)
            except RlframeError:  # it has none, or no way to wait for them; or it stops
                break
        with self._lock:
            self._thread = None  # the next `subscribe` starts it again

    def _publish(self, version: int, reference: Any) -> None:
        with self._lock:
            self._newest = version, [reference]
            for offer in self._wanted.values():
                offer(*self._newest)


class FetchedVersions:
    """The readers' side, on another Ray node.

    Args:
        subscribe: asks a host to give each version to `take`.
    """

    def __init__(self, subscribe: Callable[[Any], None]) -> None:
        self._subscribe = subscribe
        self._host: Any = None
        self._asked_at = 0.0
        self._changed = threading.Condition()
        self._fetching = threading.Lock()
        self._version, self._references = -1, list[Any]()
        self._fetched: tuple[int, messages.Parts] = (-1, [])

    def take(self, version: int, references: list[Any]) -> None:
        """Take the reference to a version in Ray's object store."""
        with self._changed:
            self._version, self._references = version, references
            self._changed.notify_all()

    def answer(self, host: Any, method: str, known: int, timeout: float = 0.0) -> Any:
        """Answer `wait_for_version`, or, packed, `get_packed`, in the node's place; None: it must be called itself.

        Args:
            host: of the node.
            method: which of the two.
            known: the version that the caller has.
            timeout: as of `wait_for_version`.

        Raises:
            UnavailableError: the version did not come.
        """
        now = time.monotonic()
        if host is not self._host or now > self._asked_at + _AGAIN:
            is_new, self._host, self._asked_at = host is not self._host, host, now
            self._subscribe(host)
            if is_new:
                with self._changed:
                    self._changed.wait_for(lambda: self._version >= 0, _FIRST)
        with self._changed:
            if self._version < 0:
                return None
            if method == "wait_for_version":
                self._changed.wait_for(lambda: self._version > known, min(timeout, LONGEST_WAIT))
                return self._version
            version, references = self._version, self._references
        # The caller may be up to date.
        return messages.pack(((known, None),)) if version <= known else self._fetch(version, references)

    def _fetch(self, version: int, references: list[Any]) -> messages.Parts:
        with self._fetching:
            if self._fetched[0] != version:
                try:
                    self._fetched = version, ray.get(references[0], timeout=CALL_TIMEOUT)
                except ray.exceptions.RayError as error:
                    raise UnavailableError(f"version {version} did not come: {type(error).__name__}") from None
            return self._fetched[1]
