"""The protocols of a transport: connections to nodes, calls, answers to come, and servers.

An engine needs one transport: its file here is the only one that knows what carries the calls. `rlframe.handles`
repeats calls and gives them deadlines, whatever the transport. `tests/in_process.py` is the shortest one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

CALL_TIMEOUT = 5.0  # seconds within which every call is answered or fails; a stop waits for no longer than this


class Future(Protocol):
    """An answer to come."""

    def done(self) -> bool:
        """Return whether `result` would not wait."""

    def result(self) -> Any:
        """Wait for the answer; raise as `Client.call`."""


class Client(Protocol):
    """A connection to one node, made before the node serves or after. Any thread may use it.

    A call that was not answered may have arrived: what is called must bear to be called again.
    """

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the node, and return its result.

        Raises:
            UnavailableError: nobody answered within `CALL_TIMEOUT`, or the node said that it cannot just now: the same
                call may be sent again.
            NoMethodError: the node has no such method.
            RemoteError: the method raised; with its traceback.
            RlframeError: the method raised this one, whose cause is such a RemoteError.
        """

    def submit(self, method: str, /, *args: Any) -> Future:
        """Send a call, and return at once."""


class Server(Protocol):
    """A node that can be called.

    Attributes:
        address: what `connect` takes.
    """

    address: str

    def stop(self) -> None:
        """Answer no more."""


class Transport(Protocol):
    """A way to call objects in other processes. An address is a string that means something to it alone.

    A value: it pickles, and two that do the same are equal (a frozen dataclass, say).
    """

    def connect(self, address: str) -> Client:
        """Return a client of the node at this address. Do not wait for it."""

    def is_reachable(self, address: str) -> bool:
        """Return whether somebody listens there. If not, a call that failed is not repeated yet."""

    def serve(self, methods: Mapping[str, Callable[..., Any]], address: str | None = None) -> Server:
        """Serve these methods to other processes, several calls at a time.

        Args:
            methods: by the names that they are called by.
            address: at which; None: one on this machine that the transport picks.
        """

    def check(self, by: str) -> None:
        """Raise UsageError if a package that it needs is missing. `by` names the user's option that needs it."""


_Other = TypeVar("_Other", bound=Future)


class MappedFuture(Generic[_Other]):
    """A future whose result is read from another, when it is asked for.

    Args:
        future: the other one.
        read: gives the result of that one, once it is done, or raises.
    """

    def __init__(self, future: _Other, read: Callable[[_Other], Any]) -> None:
        self._future, self._read = future, read

    def done(self) -> bool:
        """See `Future`."""
        return self._future.done()

    def result(self) -> Any:
        """See `Future`."""
        return self._read(self._future)
