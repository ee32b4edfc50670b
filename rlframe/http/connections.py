"""Connections within bounds: how many there are, how long the head of a request may take to arrive, and how long an
answer may lie unread.

uvicorn bounds none of them: neither of a client that connects and says nothing, or never ends its headers, nor of one
that does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_DEADLINE = 30.0  # seconds from the first byte (or from connecting) to the end of the headers
HEAD_BYTES = 64 << 10
READ_DEADLINE = 60.0  # seconds in which a client has to read something of what waits for it
_SPARE_FILES = 128  # descriptors for everything that is no connection
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: application/json\r\n"
    b"Content-Length: 58\r\nConnection: close\r\n\r\n"
    b'{"status": "full", "error": "There are too many clients."}'
)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol. One more connection than `limit` is answered with 503 at once, and closed."""

    limit = 1024
    head_deadline = HEAD_DEADLINE
    read_deadline = READ_DEADLINE

    _head_bytes = 0
    _timer: asyncio.TimerHandle | None = None
    _read = 0  # how often it showed that the client has read something
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limit:
            transport.write(_FULL)
            transport.close()
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._head_is_there()
                self.send_400_response("The headers are too long.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_is_there()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read += 1

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._read += 1  # the next large one waits until this one is read: another was written, so something was
        self._await_reader()

    def _await_reader(self) -> None:
        if self._unread is None and (left := self.transport.get_write_buffer_size()):
            self._unread = self.loop.call_later(self.read_deadline, self._look_at_reader, self._read, left)

    def _look_at_reader(self, read: int, left: int) -> None:
        """Cut off who has read nothing: closing would wait for him."""
        self._unread = None
        if read == self._read and self.transport.get_write_buffer_size() >= left:
            self.transport.abort()
        else:
            self._await_reader()

    def _await_head(self) -> None:
        if self._timer is None:
            self._head_bytes = 0
            self._timer = self.loop.call_later(self.head_deadline, self.transport.close)

    def _head_is_there(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def bounded(limit: int, **deadlines: Any) -> type[BoundedProtocol]:
    """The protocol for so many connections; makes sure that the process may open as many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limit + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limit = max(1, min(limit, soft - _SPARE_FILES))
    return type("Protocol", (BoundedProtocol,), {"limit": limit, **deadlines})
