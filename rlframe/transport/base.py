"""The protocols of a transport: clients, futures and servers.

Each engine uses one transport. All code of a transport is in one file. `rlframe.handles` adds retries and deadlines to
every transport. `tests/in_process.py` is the shortest example of a transport.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

CALL_TIMEOUT = 5.0  # seconds after which a call without an answer fails; also the longest wait of a stop


class Future(Protocol):
    """A call whose answer arrives later."""

    def done(self) -> bool:
        """Return True if `result` would return or raise without waiting."""

    def result(self) -> Any:
        """Wait for the answer and return it. Raises the same errors as `Client.call`."""


class Client(Protocol):
    """A connection to one node. Any thread may use it. A client can be created before the node's server starts.

    If there is no answer, the node may still have executed the call. Callers retry such calls, so methods must be safe
    to repeat.
    """

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the node, and return its result.

        Raises:
            UnavailableError: there was no answer within `CALL_TIMEOUT`, or the method raised an UnavailableError
                because the node is not ready. The caller may retry the call.
            NoMethodError: the node has no such method.
            RemoteError: the method raised an error that is not an RlframeError. The message contains the traceback.
            RlframeError: the method raised this error. The error's cause is a RemoteError with the traceback.
        """

    def submit(self, method: str, /, *args: Any) -> Future:
        """Send a call without waiting for the answer."""


class Server(Protocol):
    """A server for the methods of a node.

    Attributes:
        address: the address for `Transport.connect`.
    """

    address: str

    def stop(self) -> None:
        """Stop serving."""


class Transport(Protocol):
    """A way to call objects in other processes. Each transport has its own format of address strings.

    A transport, such as a frozen dataclass, can be pickled. Equivalent transports compare equal.
    """

    def connect(self, address: str) -> Client:
        """Return a client for the node at this address, without waiting for the node."""

    def is_reachable(self, address: str) -> bool:
        """Return True if a server listens at the address. The caller retries failed calls only if this is True."""

    def serve(self, methods: Mapping[str, Callable[..., Any]], address: str | None = None) -> Server:
        """Serve methods to other processes. Several calls may run at the same time.

        Args:
            methods: the methods, by name.
            address: address of the server. None means that the transport chooses an address on this machine.
        """

    def check(self, by: str) -> None:
        """Raise UsageError if a required package is missing.

        Args:
            by: the option that needs the package, for the error message.
        """


_Source = TypeVar("_Source", bound=Future)


class MappedFuture(Generic[_Source]):
    """A future whose result is computed from a source future.

    Args:
        future: the source future.
        read: function (source future) -> result, called by `result`. This function may wait for the source future,
            and may raise.
    """

    def __init__(self, future: _Source, read: Callable[[_Source], Any]) -> None:
        self._future, self._read = future, read

    def done(self) -> bool:
        """See `Future`."""
        return self._future.done()

    def result(self) -> Any:
        """See `Future`."""
        return self._read(self._future)
