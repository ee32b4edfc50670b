"""Run a service in a process or a thread, with limits for connections and an orderly shutdown.

uvicorn itself has no limits for the number of connections, for the time in which the headers of a request must arrive,
and for the time in which a client must read a response.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rlframe.errors import PeerError, UsageError
from rlframe.interprocess.heartbeat import Phase, advance
from rlframe.shutdown import Closeable

_SERVING = Phase("serving", 300.0)
DRAIN = 10  # maximum seconds in which running requests must finish at shutdown
_END = 2.0 * DRAIN  # maximum seconds in which the server's thread must end
_READY = 60.0  # maximum seconds in which the server must start
HEAD_BYTES = 64 << 10
_SPARE_FILES = 128  # number of file descriptors that connections may not use
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: application/json\r\n"
    b"Content-Length: 58\r\nConnection: close\r\n\r\n"
    b'{"status": "full", "error": "There are too many clients."}'
)


class HttpServer(uvicorn.Server):
    """A uvicorn server with limits for connections. When `should_exit` is set, it finishes running requests and ends.

    Args:
        max_connections: Maximum number of simultaneous connections. Further connections are refused.
        on_ready: Called when the server accepts requests.
        on_shutdown: Called before the server waits for running requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_connections: int,
        on_ready: Callable[[], None],
        on_shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,  # do not use uvicorn's default, which closes all log handlers of the process
            access_log=False,
            log_level="error",
            http=bounded(max_connections),
            timeout_graceful_shutdown=DRAIN,
            timeout_keep_alive=60,
            server_header=False,
            ws="none",
        )
        super().__init__(config)
        self._on_ready, self._on_shutdown = on_ready, on_shutdown

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        with _SERVING:
            await super().serve(sockets)

    async def on_tick(self, counter: int) -> bool:
        advance()  # shows progress; `on_tick` runs ten times a second if the event loop is not blocked
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_shutdown()
        await super().shutdown(sockets)


class ServerThread(Closeable):
    """A context manager with a thread that serves an application, from the constructor until `close`.

    Args:
        host, port: Address to listen at. Port 0 means any free port.
        max_connections, on_shutdown: See `HttpServer`.
        ended: Called in the thread when the thread ends, after `close` or after a failure.
        end: Seconds that `close` waits for the thread to end.

    Raises:
        UsageError: The server cannot listen at this address.
        PeerError: The server did not start in time.

    Attributes:
        url: URL of the service.
        failure: Exception that ended the thread.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        max_connections: int,
        *,
        on_shutdown: Callable[[], None] = lambda: None,
        ended: Callable[[], None] = lambda: None,
        end: float = _END,
    ) -> None:
        self._ready, self._ended, self._end = threading.Event(), ended, end
        self.failure: BaseException | None = None
        self._listener = listen(host, port)
        self.url = f"http://{address_of(self._listener)}"
        self._server = HttpServer(app, max_connections, self._ready.set, on_shutdown)
        self._thread = threading.Thread(target=self._run, name=f"rlframe HTTP {self.url}", daemon=True)
        self._thread.start()
        if not self._ready.wait(_READY):
            self.close()
            raise PeerError(f"The service at {self.url} did not start within {_READY:g} s.")
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Finish the running requests and end the thread. Repeated calls are allowed."""
        self._server.should_exit = True
        self._thread.join(self._end)
        self._listener.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except BaseException as error:
            self.failure = error
        finally:
            self._ready.set()
            self._ended()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on this address. Raise `UsageError` if the service cannot listen there."""
    if not 0 <= port < 2**16:  # check, because the operating system would use a different port
        raise UsageError(f"A port must be from 0 to 65535, got {port}.")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # with dual, the address :: also accepts IPv4
        listener = socket.create_server(address[:2], family=family, backlog=2048, dualstack_ipv6=dual)
    except (socket.gaierror, OverflowError) as error:
        raise UsageError(f"{host}:{port} is not a valid address to listen at: {error}.") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"Port {port} of {host} is in use. Choose another port, or 0 for a free one.") from error
        raise UsageError(f"The service cannot listen at {host}:{port}: {error.strerror}.") from error
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the listener's address as HOST:PORT, in the format of a URL."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits. Connections above `limit` get a 503 response and are closed."""

    limit = 1024
    head_deadline = 30.0  # maximum seconds from the connection or the first byte to the end of the headers
    read_deadline = 60.0  # seconds in which a client must read a part of its response

    _head_bytes = 0
    _timer: asyncio.TimerHandle | None = None
    _read = 0  # number of events that show that the client reads its responses
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limit:
            transport.write(_FULL)
            transport.close()
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
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
                self._stop_head_timer()
                self.send_400_response("The headers are too long.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_read_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read += 1

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._read += 1  # the client reads: otherwise, a large response cannot be completed
        self._start_read_timer()

    def _start_read_timer(self) -> None:
        if self._unread is None and (left := self.transport.get_write_buffer_size()):
            self._unread = self.loop.call_later(self.read_deadline, self._check_client_reads, self._read, left)

    def _check_client_reads(self, read: int, left: int) -> None:
        """Disconnect a client that has read nothing since the last check. Use `abort`, because `close` would wait."""
        self._unread = None
        if read == self._read and self.transport.get_write_buffer_size() >= left:
            self.transport.abort()
        else:
            self._start_read_timer()

    def _start_head_timer(self) -> None:
        if self._timer is None:
            self._head_bytes = 0
            self._timer = self.loop.call_later(self.head_deadline, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def bounded(limit: int, **deadlines: Any) -> type[BoundedProtocol]:
    """Return a protocol class for at most `limit` connections. Increase the process's open file limit if necessary."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limit + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limit = max(1, min(limit, soft - _SPARE_FILES))
    return type("Protocol", (BoundedProtocol,), {"limit": limit, **deadlines})
