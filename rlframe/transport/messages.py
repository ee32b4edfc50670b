"""Messages on a stream socket: a pickle, and behind it its large arrays as they lie in memory.

One message: how many parts it has, their lengths, the pickle, and each array of `_OUT_OF_BAND` bytes or more. Such an
array is copied into the kernel and out of it, and nowhere else.
"""

from __future__ import annotations

import pickle
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

_OUT_OF_BAND = 1 << 14  # bytes: a smaller array costs less within the pickle
_AT_ONCE = 1 << 16  # bytes that are read ahead: most messages are read by one call
_PARTS = 512  # that one call sends; the kernel takes 1,024

Parts = list[np.ndarray]  # uint8: the pickle, and its arrays


def pack(content: Any) -> Parts:
    """Return the message of an object. Raise as pickle does if it cannot be pickled."""
    arrays: Parts = []

    def keeps_in_band(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes >= _OUT_OF_BAND:
            arrays.append(np.frombuffer(view, np.uint8))
        return view.nbytes < _OUT_OF_BAND

    pickled = _dumps(content, keeps_in_band, arrays)
    return [np.frombuffer(pickled, np.uint8), *arrays]


def unpack(parts: Parts) -> Any:
    """Return the object of a message. Raise as pickle does if it cannot be read here."""
    return pickle.loads(parts[0].data, buffers=parts[1:])


def send(connection: socket.socket, parts: Parts) -> None:
    """Send a message. Raise OSError if the other side is gone, or takes too long."""
    header = struct.pack(f"<{len(parts) + 1}Q", len(parts), *(part.nbytes for part in parts))
    if len(parts) == 1:
        connection.sendall(b"".join((header, parts[0].data)))
        return
    left = [memoryview(header), *(part.data for part in parts)]
    while left:
        sent = connection.sendmsg(left[:_PARTS])
        while left and sent >= left[0].nbytes:
            sent -= left.pop(0).nbytes
        if sent:
            left[0] = left[0][sent:]


def receive(connection: socket.socket) -> Parts:
    """Receive the next message, which nothing may follow before it is answered.

    Raises:
        EOFError: the other side is gone.
        OSError: the same, or it takes too long.
    """
    ahead = bytearray(_AT_ONCE)
    got = _fill(connection, ahead, 0, 8)
    (count,) = struct.unpack_from("<Q", ahead)
    begin = 8 * (count + 1)
    if begin > len(ahead):
        ahead.extend(bytes(begin - len(ahead)))
    got = _fill(connection, ahead, got, begin)
    lengths = struct.unpack_from(f"<{count}Q", ahead, 8)
    end = begin + lengths[0]
    if count == 1 and end <= len(ahead):  # it fits, as most do
        _fill(connection, ahead, got, end)
        return [np.frombuffer(ahead, np.uint8)[begin:end]]
    # What was read ahead is the beginning; each part gets memory of its own, which nobody needs to have cleared.
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
    # It takes three times as long: only where it is needed, for what other processes cannot import.
    if loaded is None or not loaded.list_registry_pickle_by_value():
        try:
            return pickle.dumps(content, 5, buffer_callback=keeps_in_band)
        except Exception:
            arrays.clear()
    import cloudpickle

    by_value: bytes = cloudpickle.dumps(content, 5, buffer_callback=keeps_in_band)
    return by_value


def _fill(connection: socket.socket, into: bytearray | memoryview, got: int, least: int) -> int:
    """Read until there are at least so many bytes, perhaps more; return how many there are."""
    view = memoryview(into)
    while got < least:
        count = connection.recv_into(view[got:])
        if not count:
            raise EOFError("the other side has closed the connection")
        got += count
    return got
