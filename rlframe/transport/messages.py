"""Send and receive objects over a stream socket. A message is a pickle, followed by the large arrays.

A message contains the number of its parts, their lengths, the pickle, and each array of at least `_OUT_OF_BAND` bytes.
These large arrays are not pickled. They are copied only into and out of the kernel.
"""

from __future__ import annotations

import pickle
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

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
