"""Handles: arguments that represent an object in another process.

Many arguments accept either an object or a handle. `resolve` converts a handle to a `Remote`, which makes calls with
retries and a deadline, over any transport. `resolve` returns a plain object unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from rlframe import extras, retry
from rlframe.errors import PeerError, RemoteError, StoppedError, UnavailableError, UsageError
from rlframe.interprocess.heartbeat import waiting_for
from rlframe.launchpad_nodes.node import refuse_nodes as refuse_nodes
from rlframe.shutdown import is_program_stopping as is_program_stopping
from rlframe.shutdown import program_stop_event as program_stop_event
from rlframe.shutdown import stop_program as stop_program
from rlframe.shutdown import stop_with_program as stop_with_program
from rlframe.transport import DEFAULT, Client, Future, Transport, courier

DEADLINE = 120.0  # seconds for a call with all its retries; long enough for a restart of the peer

_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds: first and longest pause between attempts at all addresses
_WARN_AFTER = 1.0  # seconds without an answer before a warning, after an earlier answer to the same method
_STARTS_WITHIN = 60.0  # seconds before a warning if the peer never answered, because it can still import or compile
_SHORT = 5.0  # seconds; a call with a deadline of at most this value raises its error without an earlier warning
_RETURN_AFTER = 30.0  # seconds after which calls try the preferred peer again

_log = logging.getLogger(__name__)


def resolve(
    target: Any,
    name: str,
    *,
    deadline: float = DEADLINE,
    stop: threading.Event | None = None,
    first: int = 0,
) -> Any:
    """Return an object whose methods can be called.

    Args:
        target: an object, a handle (`Remote`, Launchpad handle or Courier client), or a list of them. In a list, any
            peer can answer.
        name: name of the target, for messages.
        deadline: seconds until an unanswered call raises an error.
        stop: an event that ends the wait early.
        first: index of the preferred peer in a list, modulo the length of the list.

    Returns:
        For an object: the object. For a list of objects: the preferred object. For one or several handles: a `Remote`.
        For other Launchpad handles: their client, such as a `reverb.Client`.

    Raises:
        UsageError: the list is empty, mixes handles with objects, or mixes transports; or the target is a Launchpad
            node that does not belong to a program.
    """
    targets = [_dereference(one, name) for one in (target if type(target) in (list, tuple) else [target])]
    located = [found for one in targets if (found := _locate(one)) is not None]
    if targets and not located:
        return targets[first % len(targets)]
    if len(located) < len(targets) or len({transport for transport, _ in located}) != 1:
        kinds = ", ".join(type(one).__name__ for one in targets) or "nothing"
        raise UsageError(
            f"A list given as the {name} must contain handles to nodes of one program, or objects, not both: {kinds}."
        )
    addresses = [address for _, several in located for address in several]
    first %= len(addresses)
    return Remote(addresses[first:] + addresses[:first], name, deadline, stop, located[0][0])


class Remote:
    """A proxy for an object in another process. Calls have retries and a deadline.

    If there is no answer, the call is sent again to each address in turn, with exponential backoff. So remote methods
    must be safe to repeat.
    After `_RETURN_AFTER` seconds, the first address is tried again. Pickling keeps only the addresses, the name, the
    deadline and the transport.

    One call, `remote.get_params(3)`:

        _call                           # selects an address (`_peer`) and sends the call
          _complete                     # retries until there is an answer, `stop` is set, or the deadline has passed
            _answer                     # one attempt: returns the answer, or raises the method's error

    Args:
        addresses: addresses of nodes that can all answer, the preferred node first.
        name: name of the peer, for messages.
        deadline: seconds for one call with all its retries.
        stop: an event that ends the wait early.
        transport: transport of the calls.

    Raises (every method):
        PeerError: no node answered within the deadline.
        StoppedError: `stop` was set, or the program stopped, before an answer arrived.
        RemoteError: the method raised an error. A `RlframeError` keeps its type.
    """

    def __init__(
        self,
        addresses: list[str],
        name: str,
        deadline: float = DEADLINE,
        stop: threading.Event | None = None,
        transport: Transport = DEFAULT,
    ) -> None:
        self._addresses, self._name, self._deadline = list(addresses), name, deadline
        self._transport, self._stop = transport, stop
        self._stops = [event for event in (stop, program_stop_event()) if event is not None]
        self._clients: dict[str, Client] = {}
        self._current = 0
        self._left_at = 0.0
        self._answered: set[str] = set()  # methods that have returned an answer

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):  # pickle looks up private methods, which nodes do not have
            raise AttributeError(method)
        return functools.partial(self._call, method)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._addresses, self._name, self._deadline, None, self._transport)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        address, client = self._peer()
        take = functools.partial(client.call, method, *args, **kwargs)
        return self._complete(address, take, method, args, kwargs, began)

    def _answer(self, address: str, method: str, take: Callable[[], Any]) -> Any:
        """Call `take`, which waits for the answer of the node at `address`. Return the answer.

        Raises:
            UnavailableError: no answer; the caller should retry.
        """
        try:
            answer = take()
        except UnavailableError:
            raise
        except Exception as error:
            raised = f"{self._who(address)} raised in {method}(): "
            if isinstance(error, RemoteError):
                raise type(error)(f"{raised}{error}") from None
            if isinstance(error.__cause__, RemoteError):
                raise error from RemoteError(f"{raised}{error.__cause__}")
            raise
        self._answered.add(method)
        return answer

    def _complete(
        self, address: str, take: Callable[[], Any], method: str, args: Any, kwargs: Any, began: float
    ) -> Any:
        """Call `take`, which waits for the answer of the node at `address`. Retry until there is an answer."""
        try:
            return self._answer(address, method, take)
        except UnavailableError as error:
            reason = str(error)
        pauses, warned = retry.backoff(_PAUSE, _LONGEST_PAUSE), False
        warn_after = _WARN_AFTER if method in self._answered else _STARTS_WITHIN
        with waiting_for(f"the {self._name}"):
            for attempt in itertools.count(1):
                if attempt % len(self._addresses) == 0:
                    waited, why = time.monotonic() - began, reason.rstrip(".")
                    if waited > warn_after and not warned and self._deadline > _SHORT:
                        warned = True
                        _log.warning("%s does not answer %s(): %s. Retrying.", self._who(address), method, why)
                    if waited >= self._deadline:
                        raise PeerError(
                            f"{self._who(address)} did not answer {method}() within {self._deadline:g} s ({why}). "
                            "Check that node's output: it may have failed, hang, or listen at another address."
                        )
                    unanswered = f"{self._who(address)} had not answered {method}()"
                    self._pause(min(next(pauses), self._deadline - waited), unanswered)
                self._leave(address)
                address, client = self._peer()
                if not self._transport.is_reachable(address):
                    reason = f"nothing listens at {address}"
                    continue
                try:
                    return self._answer(address, method, functools.partial(client.call, method, *args, **kwargs))
                except UnavailableError as error:
                    reason = str(error)
        raise AssertionError

    def _pause(self, seconds: float, unanswered: str) -> None:
        end = time.monotonic() + seconds
        while True:
            if any(event.is_set() for event in self._stops):
                raise StoppedError(f"{unanswered} when the caller was stopped.")
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.1))

    def _peer(self) -> tuple[str, Client]:
        """Return the address and client of the peer to call."""
        if self._current and time.monotonic() > self._left_at + _RETURN_AFTER:
            self._left_at = time.monotonic()
            if self._transport.is_reachable(self._addresses[0]):
                self._current = 0
        address = self._addresses[self._current]
        if address not in self._clients:
            self._clients[address] = self._connect(address)
        return address, self._clients[address]

    def _connect(self, address: str) -> Client:
        """Return a new client. A subclass may return a client with a faster transport for some methods."""
        return self._transport.connect(address)

    def _leave(self, address: str) -> None:
        """Use the next address for later calls. Do nothing if another call has already switched to it."""
        if self._addresses[self._current] == address and len(self._addresses) > 1:
            if self._current == 0:
                self._left_at = time.monotonic()
            self._current = (self._current + 1) % len(self._addresses)
            _log.info("%s does not answer: switching to %s.", self._who(address), self._addresses[self._current])

    def _who(self, address: str) -> str:
        return f"The {self._name} at {address}"


class AsyncCall:
    """A call that was sent without waiting for its answer. `result` waits for the answer."""

    def __init__(self, remote: Remote, method: str, args: tuple[Any, ...]) -> None:
        self._remote, self._method, self._args = remote, method, args
        self._began = time.monotonic()
        self._address, client = remote._peer()
        self._future = client.submit(method, *args)

    def done(self) -> bool:
        """Return True if the first attempt has ended. If it has failed, `result` can still take time for retries."""
        return self._future.done()

    def result(self) -> Any:
        """Wait for the method's result and return it. Raise the errors of `Remote`."""
        take = self._future.result
        return self._remote._complete(self._address, take, self._method, self._args, {}, self._began)


class Poller:
    """Calls one method of a peer again and again, without waiting for answers.

    Args:
        peer: result of `resolve` for a single target.
        method: name of the method.
    """

    def __init__(self, peer: Any, method: str) -> None:
        self._peer, self._method = peer, method
        self._future: Future | None = None

    def __call__(self, *args: Any) -> Any:
        """Return the answer to the previous call and send the next call. Return None while no answer has arrived."""
        if not isinstance(self._peer, Remote):
            return getattr(self._peer, self._method)(*args)
        answer = None
        if self._future is not None:
            if not self._future.done():
                return None
            with contextlib.suppress(Exception):  # The peer could be in a restart, so try again.
                answer = self._future.result()
            self._future = None
        address, client = self._peer._peer()
        if answer is not None or self._peer._transport.is_reachable(address):
            self._future = client.submit(self._method, *args)
        return answer


def _dereference(target: Any, name: str) -> Any:
    refuse_nodes(target, f"as the {name}")
    is_handle = extras.is_instance(target, "launchpad.nodes.dereference", "Dereferenceable")
    return target.dereference() if is_handle else target


def _locate(target: Any) -> tuple[Transport, list[str]] | None:
    """Return the transport and addresses of a handle; None if `target` is an object in this process."""
    if isinstance(target, Remote):
        return target._transport, target._addresses
    address = courier.address_of(target)
    return None if address is None else (DEFAULT, [address])
