"""The control API as a thread of whoever holds the coordinator, or a handle to it."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from rlframe import handles
from rlframe.coordinator.control.app import COORDINATOR, Kind, make_app
from rlframe.http.serving import ServerThread
from rlframe.http.token_file import check_guarded, read_token

_MAX_CONNECTIONS = 256
_ATTEMPTS = 2.0  # seconds for which a call to another process is repeated; the app has deadlines of its own


@contextlib.contextmanager
def serve_control(
    target: Any,
    host: str = "127.0.0.1",
    port: int = 0,
    token_file: str | None = None,
    *,
    kind: Kind = COORDINATOR,
) -> Any:
    """Serves the control of a coordinator for the time of a `with`, which gets a `ServerThread` with its `url`.

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
    app = make_app(target, read_token(token_file), kind=kind)
    with ServerThread(app, host, port, _MAX_CONNECTIONS, let_go=app.state.let_go) as server:
        try:
            yield server
        finally:
            stop.set()
