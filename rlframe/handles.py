"""Handles: an argument may be an object, or stand for an object in another process.

`resolve` decides which it is. A handle becomes a `Remote`: each call has a deadline, and is repeated until it is
answered, with every transport. An object is returned unchanged, and costs nothing.
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
from rlframe.interprocess.phases import waiting_for
from rlframe.launchpad_nodes.node import refuse_nodes as refuse_nodes
from rlframe.shutdown import is_program_stopping as is_program_stopping
from rlframe.shutdown import program_stop_event as program_stop_event
from rlframe.shutdown import stop_program as stop_program
from rlframe.shutdown import stop_with_program as stop_with_program
from rlframe.transport import DEFAULT, Client, Future, Transport, courier

DEADLINE = 120.0  # seconds for a call with all its repetitions: a peer that is restarted is back by then

_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between two rounds of attempts, doubled from round to round
_WARN_AFTER = 1.0  # seconds without an answer, of a peer that has answered before
_STARTS_WITHIN = 60.0  # the same, of one that may still import and compile: no reason to warn of it
_SHORT = 5.0  # seconds: of calls with no more than that the error tells in time, so nothing warns of it before
_RETURN_AFTER = 30.0  # seconds after which the first of several peers is tried again

_log = logging.getLogger(__name__)


def resolve(
    target: Any,
    name: str,
    *,
    deadline: float = DEADLINE,
    stop: threading.Event | None = None,
    first: int = 0,
) -> Any:
    """Return an object to call, for an argument that may be the object itself or a handle to it.

    Args:
        target: an object, which is returned unchanged; or a handle (a `Remote`, a Launchpad handle, a Courier client);
            or a list of those, any of which can answer (of objects in this process, one is taken).
        name: for messages.
        deadline: seconds after which a call that nobody answers is an error.
        stop: an event that also ends the wait.
        first: which of several to call as long as it answers (modulo how many there are).

    Returns:
        The object, or a `Remote`. A Launchpad handle of another kind gives its client: a `reverb.Client`.

    Raises:
        UsageError: a list is empty, or holds something that is not in another process, or handles of two transports; or
            it is a Launchpad node that is in no program.
    """
    targets = [_dereference(one, name) for one in (target if type(target) in (list, tuple) else [target])]
    located = [found for one in targets if (found := _locate(one)) is not None]
    if targets and not located:
        return targets[first % len(targets)]
    if len(located) < len(targets) or len({transport for transport, _ in located}) != 1:
        kinds = ", ".join(type(one).__name__ for one in targets) or "nothing"
        raise UsageError(
            f"A list given as the {name} must hold handles to nodes of one program, or objects, not both: {kinds}."
        )
    addresses = [address for _, several in located for address in several]
    first %= len(addresses)
    return Remote(addresses[first:] + addresses[:first], name, deadline, stop, located[0][0])


class Remote:
    """An object in another process: its methods are called with deadlines.

    A call that is not answered is sent again (remote calls are idempotent), to each address in turn, with pauses that
    grow. After `_RETURN_AFTER` seconds the first address is tried again. Pickles as its addresses and transport.

    One call, `remote.get_params(3)`:

        _call                           # picks an address (`_peer`), and sends the call
          _complete                     # repeats it until it is answered, `stop` is set, or the deadline has passed
            _answer                     # one attempt: returns the answer, or raises what the method raised

    Args:
        addresses: of nodes any of which can answer, the preferred one first.
        name: for messages.
        deadline: seconds for one call, repetitions included.
        stop: an event that also ends the wait.
        transport: carries the calls.

    Raises (every method):
        PeerError: nobody answered within the deadline.
        StoppedError: `stop` was set, or the program ended, while nobody answered.
        RemoteError: the method raised. A `RlframeError` comes as what it was.
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
        self._answered: set[str] = set()  # methods

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):  # nodes do not expose these, and pickle asks for some
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
        """Return what `take` returns: the answer of the node at `address`.

        Raises:
            UnavailableError: it did not answer, so the call is worth repeating.
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
        """Return what `take` returns, the answer to a call of `address`. Until it is answered, send it again."""
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
                        _log.warning("%s does not answer %s(): %s. Trying on.", self._who(address), method, why)
                    if waited >= self._deadline:
                        raise PeerError(
                            f"{self._who(address)} did not answer {method}() within {self._deadline:g} s ({why}). "
                            "Look at that node's output: it may have failed, hang, or listen at another address."
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
                raise StoppedError(f"Told to stop while {unanswered}.")
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.1))

    def _peer(self) -> tuple[str, Client]:
        """Return (address, client) of the peer to call."""
        if self._current and time.monotonic() > self._left_at + _RETURN_AFTER:
            self._left_at = time.monotonic()
            if self._transport.is_reachable(self._addresses[0]):
                self._current = 0
        address = self._addresses[self._current]
        if address not in self._clients:
            self._clients[address] = self._connect(address)
        return address, self._clients[address]

    def _connect(self, address: str) -> Client:
        """Return a new client. A subclass's may know a better way for some methods of its kind of node."""
        return self._transport.connect(address)

    def _leave(self, address: str) -> None:
        """Choose the next peer, unless another call has done so."""
        if self._addresses[self._current] == address and len(self._addresses) > 1:
            if self._current == 0:
                self._left_at = time.monotonic()
            self._current = (self._current + 1) % len(self._addresses)
            _log.info("%s does not answer: going on with %s.", self._who(address), self._addresses[self._current])

    def _who(self, address: str) -> str:
        return f"The {self._name} at {address}"


class AsyncCall:
    """A call that was sent, so that other work can be done until its answer is wanted."""

    def __init__(self, remote: Remote, method: str, args: tuple[Any, ...]) -> None:
        self._remote, self._method, self._args = remote, method, args
        self._began = time.monotonic()
        self._address, client = remote._peer()
        self._future = client.submit(method, *args)

    def done(self) -> bool:
        """Return True if `result` would not wait, unless the call must be sent again."""
        return self._future.done()

    def result(self) -> Any:
        """Return the method's result. Raise as `Remote` does."""
        take = self._future.result
        return self._remote._complete(self._address, take, self._method, self._args, {}, self._began)


class Poller:
    """Calls the same method of a peer again and again, and never waits for it.

    Args:
        peer: the result of `resolve` for one target.
        method: its name.
    """

    def __init__(self, peer: Any, method: str) -> None:
        self._peer, self._method = peer, method
        self._future: Future | None = None

    def __call__(self, *args: Any) -> Any:
        """Return the answer to the last call, or None if it has not come. Once it has come, send the next call."""
        if not isinstance(self._peer, Remote):
            return getattr(self._peer, self._method)(*args)
        answer = None
        if self._future is not None:
            if not self._future.done():
                return None
            with contextlib.suppress(Exception):  # a peer that is restarted, or stops: it is asked again
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
    """Return the transport and the addresses of a handle; None: `target` is an object of this process."""
    if isinstance(target, Remote):
        return target._transport, target._addresses
    address = courier.address_of(target)
    return None if address is None else (DEFAULT, [address])
