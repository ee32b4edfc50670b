"""The service as a process of its own: where it listens, and how it ends."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

import uvicorn

from rlframe.errors import UsageError
from rlframe.trajectories.app import make_app, open_service
from rlframe.trajectories.connections import bounded
from rlframe.trajectories.service import Service
from rlframe.trajectories.settings import Settings

DRAIN = 10  # seconds for requests that are under way when the service is told to end


def serve(settings: Settings, host: str, port: int, max_connections: int) -> None:
    """Serves until SIGTERM or Ctrl-C, then answers what is under way and closes the store.

    Raises:
        UsageError: it cannot listen there; a setting cannot be.
        StoreError, PeerError: as `open_service`.
    """
    listener = _listen(host, port)
    try:
        service = open_service(settings)
    except BaseException:
        listener.close()
        raise
    config = uvicorn.Config(
        make_app(settings, service),
        access_log=False,
        log_level="error",
        http=bounded(max_connections),
        timeout_graceful_shutdown=DRAIN,
        timeout_keep_alive=60,
        server_header=False,
        ws="none",
    )
    server = _Server(config, service, f"Trajectories at http://{_address(listener)}  (endpoints: /docs)")
    service.on_failure = server.give_up
    server.run(sockets=[listener])
    if service.failed is not None:
        raise service.failed


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service, greeting: str) -> None:
        super().__init__(config)
        self._service = service
        self._greeting = greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:  # from here on it answers, and ends as it should
            print(f"{self._greeting}\n{self._service.store.durability}", flush=True)

    def give_up(self) -> None:
        """The store failed: who watches over the process can start it again."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            yield
            self._captured_signals.clear()  # else uvicorn ends the process by them: having drained is a success

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stop_waiting()
        await super().shutdown(sockets)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, OverflowError) as error:
        raise UsageError(f"{host}:{port} is no address to listen at: {error}.") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"Port {port} of {host} is in use. Choose another with --port, or 0 for a free one."
            ) from error
        raise UsageError(f"{host}:{port} cannot be listened at: {error.strerror}.") from error
    listener.setblocking(False)
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
