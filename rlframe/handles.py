"""Handles: an argument may be an object, or stand for one that lives in another process.

`resolve` is the one place that asks which it is. A Launchpad handle or a Courier client becomes a `Remote`, whose
every call has a deadline; anything else is handed back as it is, and costs nothing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from rlframe import errors, extras
from rlframe.errors import PeerError, RemoteError, RlframeError, StoppedError, UnavailableError, UsageError
from rlframe.interprocess.progress import waiting_for
from rlframe.program_end import program_stop as program_stop
from rlframe.program_end import stop_program as stop_program
from rlframe.program_end import stopped_by_program as stopped_by_program

CALL_TIMEOUT = 5.0  # seconds for one attempt; a stop waits for no longer than this
DEADLINE = 120.0  # seconds for a call with all its repetitions: a peer that is restarted is back by then

_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between two rounds of attempts, doubled from round to round
_WARN_AFTER = 1.0  # seconds without an answer, of a peer that has answered before
_STARTS_WITHIN = 60.0  # the same, of one that may still import and compile: no reason to warn of it
_SHORT = 5.0  # seconds: of calls with no more than that the error tells in time, so nothing warns of it before
_RETURN_AFTER = 30.0  # seconds after which the first of several peers is tried again
NOT_ANSWERED = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")

_log = logging.getLogger(__name__)


def connect(address: str) -> Any:
    """A Courier client for the node at "host:port": its methods and, in `futures`, the same ones that do not wait."""
    with extras.needed("A call to another process", "launchpad"):
        import courier

    return courier.Client(address, call_timeout=CALL_TIMEOUT, wait_for_ready=False)


def lacks_method(error: Exception) -> bool:
    """Whether a Courier client raised this because the node has no such method."""
    return getattr(getattr(error, "code", None), "name", None) == "NOT_FOUND"


def resolve(
    target: Any,
    name: str,
    *,
    deadline: float = DEADLINE,
    stop: threading.Event | None = None,
    first: int = 0,
    connect: Callable[[str], Any] = connect,
) -> Any:
    """Something to call, for an argument that may be an object or a handle to one.

    Args:
        target: an object, which is returned as it is; a Launchpad handle or a Courier client; or a list of those, any
            of which can answer (of objects in this process, one is taken).
        name: what messages call it.
        deadline: seconds after which a call that nobody answers is an error.
        stop: an event that ends the waiting as well.
        first: which of several to call as long as it answers (modulo how many there are).
        connect: as the function `connect`: knows a better way than Courier for some methods of this kind of node.

    Returns:
        The object, or a `Remote`. Whatever else a Launchpad handle leads to (a `reverb.Client`) is returned as it is.

    Raises:
        UsageError: a list is empty, or holds something that is not in another process.
    """
    several = type(target) in (list, tuple)
    targets = [_dereference(one) for one in (target if several else [target])]
    if targets and not any(_is_client(one) for one in targets):
        return targets[first % len(targets)]
    if not targets or not all(_is_client(one) for one in targets):
        kinds = ", ".join(type(one).__name__ for one in targets) or "nothing"
        raise UsageError(f"A list given as the {name} must hold handles to nodes, or objects, not both: {kinds}.")
    addresses = [address for one in targets for address in _addresses(one)]
    first %= len(addresses)
    return Remote(addresses[first:] + addresses[:first], name, deadline, stop, connect)


class Remote:
    """An object in another process: its methods are called with deadlines, by way of Courier.

    A call that is not answered is sent again (remote calls are idempotent), with pauses that grow, to each of the
    addresses in turn; the first one is gone back to when it has had time to recover. Pickles as its addresses.

    Args:
        addresses: "host:port" of nodes any of which can answer, the preferred one first.
        name: what messages call it.
        deadline: seconds for one call, repetitions included.
        stop: an event that ends the waiting as well.
        connect: gives what calls the methods at an address.

    Raises (every method):
        PeerError: nobody answered within the deadline.
        StoppedError: `stop` was set, or the Launchpad program ended, while nobody answered.
        RemoteError: the method raised. A `RlframeError` comes as what it was.
    """

    def __init__(
        self,
        addresses: list[str],
        name: str,
        deadline: float = DEADLINE,
        stop: threading.Event | None = None,
        connect: Callable[[str], Any] = connect,
    ) -> None:
        self._addresses, self._name, self._deadline, self._connect = list(addresses), name, deadline, connect
        self._stops = [event for event in (stop, program_stop()) if event is not None]
        self._clients: dict[str, Any] = {}
        self._current = 0
        self._left_at = 0.0
        self._answered: set[str] = set()  # methods

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):  # nodes do not expose these, and pickle asks for some
            raise AttributeError(method)
        return functools.partial(self._call, method)

    def __reduce__(self) -> tuple[Any, ...]:
        return Remote, (self._addresses, self._name, self._deadline, None, self._connect)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        # Not by way of a future, which costs four times as much for a small call.
        began = time.monotonic()
        address, client = self._peer()
        try:
            answer = getattr(client, method)(*args, **kwargs)
        except Exception as error:
            reason = self._why_again(address, method, error)
        else:
            self._answered.add(method)
            return answer
        return self._repeat(address, method, args, kwargs, began, reason)

    def _repeat(self, address: str, method: str, args: Any, kwargs: Any, began: float, reason: str) -> Any:
        """Sends a call that `address` did not answer once more, until it is answered, or the time is up."""
        with waiting_for(f"the {self._name}"):
            return self._try_again(address, method, args, kwargs, began, reason)

    def _try_again(self, address: str, method: str, args: Any, kwargs: Any, began: float, reason: str) -> Any:
        pause, warned = _PAUSE, False
        warn_after = _WARN_AFTER if method in self._answered else _STARTS_WITHIN
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
                self._pause(min(pause, self._deadline - waited), f"{self._who(address)} had not answered {method}()")
                pause = min(2 * pause, _LONGEST_PAUSE)
            self._leave(address)
            address, client = self._peer()
            # gRPC waits longer and longer (up to two minutes) before it connects again, each time that it found nobody.
            # So it is asked only where somebody listens.
            if not _listens(address):
                reason = f"nothing listens at {address}"
                continue
            try:
                answer = getattr(client, method)(*args, **kwargs)
            except Exception as error:
                reason = self._why_again(address, method, error)
            else:
                self._answered.add(method)
                return answer
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

    def _peer(self) -> tuple[str, Any]:
        """(address, client) of the peer to call."""
        if self._current and time.monotonic() > self._left_at + _RETURN_AFTER:
            self._left_at = time.monotonic()
            if _listens(self._addresses[0]):
                self._current = 0
        address = self._addresses[self._current]
        if address not in self._clients:
            self._clients[address] = self._connect(address)
        return address, self._clients[address]

    def _leave(self, address: str) -> None:
        """Goes on to the next peer, unless another call has done so."""
        if self._addresses[self._current] == address and len(self._addresses) > 1:
            if self._current == 0:
                self._left_at = time.monotonic()
            self._current = (self._current + 1) % len(self._addresses)
            _log.info("%s does not answer: going on with %s.", self._who(address), self._addresses[self._current])

    def _why_again(self, address: str, method: str, error: Exception) -> str:
        """Why a call is worth repeating; raises what it came to where it is not."""
        if isinstance(error, concurrent.futures.TimeoutError):
            return f"no answer within {CALL_TIMEOUT:g} s"
        if isinstance(error, UnavailableError):  # which the peer answered, as in `InferencerClient`
            return str(error)
        code = getattr(getattr(error, "code", None), "name", None)  # of a StatusNotOk
        if code is None:
            raise error
        if code in NOT_ANSWERED:
            return str(error)
        remote = RemoteError(f"{self._who(address)} raised in {method}(): {error}")
        raised = _raised(str(error))
        if raised is None:
            raise remote from None
        if isinstance(raised, UnavailableError):
            return str(raised)
        raise raised from remote

    def _who(self, address: str) -> str:
        return f"The {self._name} at {address}"


class Call:
    """A call that was sent, so that other work can be done until its answer is wanted."""

    def __init__(self, remote: Remote, method: str, args: tuple[Any, ...]) -> None:
        self._remote, self._method, self._args = remote, method, args
        self._began = time.monotonic()
        self._address, client = remote._peer()
        self._future = getattr(client.futures, method)(*args)

    def done(self) -> bool:
        """Whether `result` would not wait (but where the call must be sent again)."""
        return self._future.done()

    def result(self) -> Any:
        """What the method returned; raises as `Remote` does."""
        try:
            # Courier ends the call at its timeout. (Cancelling the future would let a late answer fail in C++.)
            answer = self._future.result(timeout=CALL_TIMEOUT + 1.0)
        except Exception as error:
            reason = self._remote._why_again(self._address, self._method, error)
        else:
            self._remote._answered.add(self._method)
            return answer
        return self._remote._repeat(self._address, self._method, self._args, {}, self._began, reason)


class Poll:
    """Asks a peer the same again and again, and never waits for it.

    Args:
        peer: what `resolve` gave, for one target.
        method: of it.
    """

    def __init__(self, peer: Any, method: str) -> None:
        self._peer, self._method = peer, method
        self._future: Any = None

    def __call__(self, *args: Any) -> Any:
        """The answer to the call that was sent before, where it has come, and None where not; sends the next one."""
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
        if answer is not None or _listens(address):  # as in `Remote._repeat`
            self._future = getattr(client.futures, self._method)(*args)
        return answer


def _dereference(target: Any) -> Any:
    return target.dereference() if _is_instance(target, "launchpad.nodes.dereference", "Dereferenceable") else target


def _is_client(target: Any) -> bool:
    return isinstance(target, Remote) or _is_instance(target, "courier.python.client", "Client")


def _is_instance(target: Any, module_name: str, class_name: str) -> bool:
    # By type: a Courier client has every attribute that it is asked for. Nothing is an instance of a class whose
    # module nobody has imported, so neither does this file.
    module = sys.modules.get(module_name)
    return module is not None and isinstance(target, getattr(module, class_name))


def _addresses(client: Any) -> list[str]:
    return client._addresses if isinstance(client, Remote) else [client.address]


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def _raised(text: str) -> RlframeError | None:
    """The error of this package that a remote traceback ends with."""
    _, _, last = text.rstrip().rpartition("\nrlframe.errors.")
    name, _, message = last.partition(": ")
    error = getattr(errors, name, None)
    if "\nTraceback (most recent call last)" in message or not isinstance(error, type):
        return None
    return error(message)
