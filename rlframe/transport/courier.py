"""The Courier transport, which calls nodes of Launchpad programs. Addresses are "host:port".

Courier's servers listen on all interfaces, without authentication, and unpickle the data that they receive.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from rlframe import errors, extras
from rlframe.errors import NoMethodError, RemoteError, RlframeError, UnavailableError
from rlframe.transport.base import CALL_TIMEOUT, MappedFuture

_UNAVAILABLE_CODES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")  # status codes in Courier's error StatusNotOk

_Raw = concurrent.futures.Future[Any]

# Courier clients that were deleted while calls were pending, with these calls. The process would crash if the last
# reference to a client were in the client's own thread, which receives answers. So this dict keeps a reference to each
# client until all calls of the client have ended.
_dropped: dict[int, tuple[Any, set[_Raw]]] = {}


@dataclasses.dataclass(frozen=True)
class CourierTransport:
    """See `Transport`."""

    def connect(self, address: str) -> CourierClient:
        """See `Transport`."""
        return CourierClient(_courier().Client(address, call_timeout=CALL_TIMEOUT, wait_for_ready=False))

    def is_reachable(self, address: str) -> bool:
        """Return True if the port is open. A reconnect with gRPC would wait longer after each failure."""
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
        except OSError:
            return False
        return True

    def serve(self, methods: Mapping[str, Callable[..., Any]], address: str | None = None) -> CourierServer:
        """See `Transport`. Port 0 selects a free port."""
        return CourierServer(methods, address or "localhost:0")

    def check(self, by: str) -> None:
        """See `Transport`."""
        extras.require(by, "launchpad")


class CourierClient:
    """See `rlframe.transport.Client`.

    Args:
        client: a `courier.Client` with a timeout.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._pending: set[_Raw] = set()
        _release_dropped_clients()

    def __del__(self) -> None:
        if self._pending:
            _dropped[id(self._pending)] = self._client, self._pending

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """See `Client`. Use no future, because a future makes small calls four times slower."""
        try:
            return getattr(self._client, method)(*args, **kwargs)
        except Exception as error:
            _raise(error)

    def submit(self, method: str, /, *args: Any) -> MappedFuture[_Raw]:
        """See `Client`."""
        future: _Raw = getattr(self._client.futures, method)(*args)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return MappedFuture(future, _result)


class CourierServer:
    """See `rlframe.transport.Server`."""

    def __init__(self, methods: Mapping[str, Callable[..., Any]], address: str) -> None:
        courier, (host, _, port) = _courier(), address.rpartition(":")
        with _free_port() if port == "0" else contextlib.nullcontext(int(port)) as number:
            self._server = courier.Server(port=number)
            for name, method in methods.items():
                self._server.Bind(name, method)
            self._server.Start()
        self.address = f"{host}:{number}"

    def stop(self) -> None:
        """See `Server`."""
        self._server.Stop()


def address_of(target: Any) -> str | None:
    """Return the address of a `courier.Client` (a Launchpad handle in a node). Return None for other objects."""
    # Check the type, because a `courier.Client` appears to have every attribute.
    return target.address if extras.is_instance(target, "courier.python.client", "Client") else None


def _courier() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # has no effect after TensorFlow's libraries are loaded
    with extras.explain_import_error("A call to another process", "launchpad"):
        import courier
    return courier


def _release_dropped_clients() -> None:
    for key, (_, pending) in list(_dropped.items()):
        if not pending:
            _dropped.pop(key, None)


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    """Yield a free port, which is reserved until the `with` block ends. The server must bind the port in the block."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lets the server bind the same port
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind(("", 0))
        yield held.getsockname()[1]


def _result(future: _Raw) -> Any:
    try:
        # Courier ends the call after its timeout. Do not cancel the future, because a late answer would fail in C++.
        return future.result(timeout=CALL_TIMEOUT + 1.0)
    except Exception as error:
        _raise(error)


def _raise(error: Exception) -> NoReturn:
    """Convert an error from Courier to an error that `Client` documents, and raise it. Re-raise local errors."""
    if isinstance(error, concurrent.futures.TimeoutError):
        raise UnavailableError(f"no answer within {CALL_TIMEOUT:g} s") from None
    code = getattr(getattr(error, "code", None), "name", None)
    if code is None:
        raise error
    text = str(error)
    if code in _UNAVAILABLE_CODES:
        raise UnavailableError(text) from None
    # Courier also uses this code for a KeyError in the method.
    if code == "NOT_FOUND" and "\nTraceback (most recent call last)" not in text:
        raise NoMethodError(text) from None
    raised = _raised(text)
    if raised is None:
        raise RemoteError(text) from None
    raise raised from RemoteError(text)


def _raised(text: str) -> RlframeError | None:
    """Return the error if a remote traceback ends with a class from rlframe.errors. Otherwise return None."""
    _, _, last = text.rstrip().rpartition("\nrlframe.errors.")
    name, _, message = last.partition(": ")
    error = getattr(errors, name, None)
    if "\nTraceback (most recent call last)" in message or not isinstance(error, type):
        return None
    return errors.error_from_message(error, message)
