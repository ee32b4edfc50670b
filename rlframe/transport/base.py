"""The protocols of a transport: clients, futures and servers. And the format of messages on a stream socket.

Each engine uses one transport. All code of a transport is in one file. `rlframe.handles` adds retries and deadlines to
every transport. `tests/in_process.py` is the shortest example of a transport.

A message contains the number of its parts, their lengths, a pickle, and each array of at least `_OUT_OF_BAND` bytes.
These large arrays are not pickled. They are copied only into and out of the kernel.
"""

from __future__ import annotations

import pickle
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

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


_OUT_OF_BAND = 1 << 14  # minimum bytes of an array outside the pickle; smaller arrays are sent faster inside it
_READ_AHEAD = 1 << 16  # maximum bytes of the first read; most messages are shorter
_MAX_PARTS = 512  # maximum number of parts in one system call; the kernel's limit is 1,024

Parts = list[np.ndarray]  # parts of a message, as uint8 arrays: the pickle, then the large arrays


def pack(content: Any) -> Parts:
    """Return a message that contains an object. Raise pickle's errors if the object cannot be pickled."""
    arrays: Parts = []

    def keeps_in_band(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes >= _OUT_OF_BAND:
            arrays.append(np.frombuffer(view, np.uint8))
        return view.nbytes < _OUT_OF_BAND

    pickled = _dumps(content, keeps_in_band, arrays)
    return [np.frombuffer(pickled, np.uint8), *arrays]


def unpack(parts: Parts) -> Any:
    """Return the object in a message. Raise pickle's errors if the object cannot be unpickled."""
    return pickle.loads(parts[0].data, buffers=parts[1:])


def send(connection: socket.socket, parts: Parts) -> None:
    """Send a message. Raise OSError if the peer has closed the connection, or after the socket's timeout."""
    header = struct.pack(f"<{len(parts) + 1}Q", len(parts), *(part.nbytes for part in parts))
    if len(parts) == 1:
        connection.sendall(b"".join((header, parts[0].data)))
        return
    left = [memoryview(header), *(part.data for part in parts)]
    while left:
        sent = connection.sendmsg(left[:_MAX_PARTS])
        while left and sent >= left[0].nbytes:
            sent -= left.pop(0).nbytes
        if sent:
            left[0] = left[0][sent:]


def receive(connection: socket.socket) -> Parts:
    """Receive the next message. The peer must not send another message before it gets an answer.

    Raises:
        EOFError: the peer has closed the connection.
        OSError: the connection failed, or the socket's timeout passed.
    """
    ahead = bytearray(_READ_AHEAD)
    got = _fill(connection, ahead, 0, 8)
    (count,) = struct.unpack_from("<Q", ahead)
    begin = 8 * (count + 1)
    if begin > len(ahead):
        ahead.extend(bytes(begin - len(ahead)))
    got = _fill(connection, ahead, got, begin)
    lengths = struct.unpack_from(f"<{count}Q", ahead, 8)
    end = begin + lengths[0]
    # the common case: a message without large arrays that fits into the first read
    if count == 1 and end <= len(ahead):
        _fill(connection, ahead, got, end)
        return [np.frombuffer(ahead, np.uint8)[begin:end]]
    # Allocate memory for each part. Copy the bytes that the first read has received, then receive the other bytes.
    arrived, parts = np.frombuffer(ahead, np.uint8)[begin:got], []
    for length in lengths:
        part = np.empty(length, np.uint8)
        here = min(length, len(arrived))
        part[:here] = arrived[:here]
        arrived = arrived[here:]
        _fill(connection, part.data, here, length)
        parts.append(part)
    return parts


def _dumps(content: Any, keeps_in_band: Callable[[pickle.PickleBuffer], bool], arrays: Parts) -> bytes:
    loaded = sys.modules.get("cloudpickle")
    # Use cloudpickle only for objects that other processes cannot import. cloudpickle takes three times as long.
    if loaded is None or not loaded.list_registry_pickle_by_value():
        try:
            return pickle.dumps(content, 5, buffer_callback=keeps_in_band)
        except Exception:
            arrays.clear()
    import cloudpickle

    return cloudpickle.dumps(content, 5, buffer_callback=keeps_in_band)


def _fill(connection: socket.socket, into: bytearray | memoryview, got: int, least: int) -> int:
    """Receive until the buffer `into`, which has `got` bytes, has `least` bytes or more. Return its number of bytes."""
    view = memoryview(into)
    while got < least:
        count = connection.recv_into(view[got:])
        if not count:
            raise EOFError("the other side has closed the connection")
        got += count
    return got
