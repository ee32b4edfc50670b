"""The service as a process of its own, or as a node of a program."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from socket import socket
from typing import Any

from rlframe import handles
from rlframe.errors import PeerError
from rlframe.http.serving import DRAIN, HttpServer, address_of, listen
from rlframe.http.token_file import check_guarded, no_token_means
from rlframe.trajectories.service.app import make_app, open_service
from rlframe.trajectories.service.service import Service
from rlframe.trajectories.service.settings import CAN, Settings

MAX_CONNECTIONS = 1024

_READY = 60.0  # seconds for it to begin


def serve(settings: Settings, host: str, port: int, max_connections: int) -> None:
    """Serve until SIGTERM or Ctrl-C, then answer what is under way and close the store.

    Raises:
        UsageError: it cannot listen there, or needs a token to; a setting cannot be.
        StoreError, PeerError: as `open_service`.
    """
    _run(*_prepared(settings, host, port, max_connections, lambda: None))


class TrajectoryServer:
    """The service as a node of a program: it answers from its construction until `stop()`.

    Args:
        settings: see `Settings`.
        host, port: where it listens.

    Raises:
        UsageError, StoreError, PeerError: as `serve`.

    Attributes:
        url: of the service.
    """

    def __init__(self, settings: Settings, host: str, port: int) -> None:
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        prepared = _prepared(settings, host, port, MAX_CONNECTIONS, self._ready.set)
        self._server, _, listener = prepared
        self.url = f"http://{address_of(listener)}"
        self._thread = threading.Thread(target=self._run, args=prepared, name="trajectories", daemon=True)
        self._thread.start()
        if not self._ready.wait(_READY):
            raise PeerError(f"The trajectory service did not begin within {_READY:g} s.")
        self._check()

    def run(self) -> None:
        """Return after `stop()`. Raises StoreError where the store failed: what was acknowledged is in it."""
        with handles.stopped_by_program(self.stop):
            self._thread.join()
        self._check()

    def stop(self) -> None:
        """End `run()` once the requests under way are answered. Any thread may call it."""
        self._server.should_exit = True

    def close(self) -> None:
        """`stop`, and waits for the end."""
        self.stop()
        self._thread.join(2 * DRAIN)

    def _run(self, *prepared: Any) -> None:
        try:
            _run(*prepared)
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


def _prepared(
    settings: Settings, host: str, port: int, max_connections: int, greeted: Callable[[], None]
) -> tuple[HttpServer, Service, socket]:
    """What `_run` takes. `greeted` is called once the service answers."""
    check_guarded(host, settings.token_file, CAN, settings.no_token)
    listener = listen(host, port)
    try:
        service = open_service(settings)
    except BaseException:
        listener.close()
        raise

    def greeting() -> None:
        if settings.no_token:
            print(no_token_means(CAN), file=sys.stderr, flush=True)
        address = address_of(listener)
        print(f"Trajectories at http://{address}  (endpoints: /docs)\n{service.store.durability}", flush=True)
        greeted()

    def give_up() -> None:  # the store failed: who watches over the process can start it again
        server.should_exit = True

    server = HttpServer(make_app(settings, service), max_connections, greeting, service.stop_waiting)
    service.on_failure = give_up
    return server, service, listener


def _run(server: HttpServer, service: Service, listener: socket) -> None:
    server.run(sockets=[listener])
    if service.failed is not None:
        raise service.failed
