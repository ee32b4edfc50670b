"""The control API as a thread of whoever holds the coordinator, or a handle to it."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from starlette.applications import Starlette

from rlframe import handles
from rlframe.coordinator.control.app import COORDINATOR, Kind, make_app
from rlframe.errors import PeerError
from rlframe.http.serving import Server, address_of, listen
from rlframe.http.token_file import check_guarded, read_token

_MAX_CONNECTIONS = 256
_ATTEMPTS = 2.0  # seconds for which a call to another process is repeated; the app has deadlines of its own
_READY = 30.0  # seconds for it to begin
_END = 15.0  # seconds for it to end: what is under way has ten


class ControlServer:
    """Serves an application in a thread, from when it is made until `close`. A context manager.

    Attributes:
        url: where it answers.
    """

    def __init__(self, app: Starlette, host: str, port: int) -> None:
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._listener = listen(host, port)
        self.url = f"http://{address_of(self._listener)}"
        self._server = Server(app, _MAX_CONNECTIONS, self._ready.set, let_go=app.state.let_go)
        self._thread = threading.Thread(target=self._run, name="rlframe control", daemon=True)
        self._thread.start()
        if not self._ready.wait(_READY):
            self.close()
            raise PeerError(f"The control API did not begin within {_READY:g} s.")
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Answers what is under way, and ends within seconds. May be called again."""
        self._server.should_exit = True
        self._thread.join(_END)
        self._listener.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()


@contextlib.contextmanager
def serve_control(
    target: Any,
    host: str = "127.0.0.1",
    port: int = 0,
    token_file: str | None = None,
    *,
    kind: Kind = COORDINATOR,
) -> Any:
    """Serves the control of a coordinator for the time of a `with`, which gets a `ControlServer` with its `url`.

    Args:
        target: a Coordinator, or a handle to one (it may be restarted meanwhile).
        host: address to listen at.
        port: 0: one that is free.
        token_file: with the token that requests have to carry; None: none is needed, and only loopback may be
            listened at.
        kind: of the target.

    Raises:
        UsageError: it cannot listen there; the token file cannot be read, or is needed.
    """
    check_guarded(host, token_file, "steer and stop the run")
    stop = threading.Event()
    target = handles.resolve(target, "coordinator", deadline=_ATTEMPTS, stop=stop)
    with ControlServer(make_app(target, read_token(token_file), kind=kind), host, port) as server:
        try:
            yield server
        finally:
            stop.set()
