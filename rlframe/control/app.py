"""The control API of a run with or without a coordinator: the FastAPI application, and a thread that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
import threading
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from rlframe import handles
from rlframe.control.calls import CoordinatorCalls, EventLog
from rlframe.control.endpoints import REFUSED, command_router, read_families, reading_router
from rlframe.errors import FieldError, RlframeError, UsageError
from rlframe.http.app import make_app as make_base_app
from rlframe.http.bodies import answer
from rlframe.http.config import check_access_is_restricted, read_token
from rlframe.http.serving import ServerThread

PAGE = pathlib.Path(__file__).with_name("page.html")  # this web page reads /status and /events/stream
_MAX_BODY = 1 << 20
_MAX_CONNECTIONS = 256
_CALL_DEADLINE = 2.0  # seconds for retries of a remote call; short, because `CoordinatorCalls` adds its own deadline
_WITHOUT_TOKEN = ("/healthz",)
_RETRY_AFTER = 1  # seconds in the header Retry-After of a 503 response
_TYPES = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    422: "invalid",
    503: "unavailable",
}
_DESCRIPTION = """Monitors and controls a run. `GET /` returns a web page for browsers."""


@dataclasses.dataclass(frozen=True)
class ControlKind:
    """The title, metric prefix and commands of an application."""

    title: str
    prefix: str  # first part of each metric's name
    commands: tuple[str, ...]  # methods of the target that the API offers


COORDINATOR = ControlKind(
    "rlframe coordinator",
    "rlframe_coordinator_",
    ("cancel", "pause", "unpause", "scale", "evaluate_now", "checkpoint", "restore"),
)
RUN = ControlKind("rlframe run", "rlframe_run_", ("cancel",))  # for runs without a coordinator


@contextlib.contextmanager
def serve_control(
    target: Any,
    host: str = "127.0.0.1",
    port: int = 0,
    token_file: str | None = None,
    *,
    kind: ControlKind = COORDINATOR,
) -> Any:
    """Serve the control API in a thread during a `with` block. Yield a `ServerThread` with its `url`.

    Args:
        target: A Coordinator, or a handle to one. The coordinator may restart during the block.
        host: Address to listen on.
        port: Port to listen on; 0 chooses a free port.
        token_file: File with the token that requests must send. None means no token; then `host` must be a loopback
            address.
        kind: The kind of the target.

    Raises:
        UsageError: The server cannot listen on this address, or the token file is unreadable or missing.
    """
    check_access_is_restricted(host, token_file, "steer and stop the run")
    stop = threading.Event()
    target = handles.resolve(target, "coordinator", deadline=_CALL_DEADLINE, stop=stop)
    app = make_app(target, read_token(token_file), kind=kind)
    with ServerThread(app, host, port, _MAX_CONNECTIONS, on_shutdown=app.state.on_shutdown) as server:
        try:
            yield server
        finally:
            stop.set()


def make_app(
    target: Any,
    token: str | None = None,
    *,
    kind: ControlKind = COORDINATOR,
) -> FastAPI:
    """Return the application. `app.state.on_shutdown()` ends the event streams, so that the server can stop at once.

    Args:
        target: An object with the methods `status`, `events` and the commands of `kind`. They may block. If one raises
            `PeerError` or `UnavailableError`, the response is 503.
        token: The token that requests must send, except for the static page and /healthz. None means no token.
        kind: The kind of the target.
    """
    calls = CoordinatorCalls(target)

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        following = asyncio.create_task(log.follow())
        try:
            yield
        finally:
            log.close()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    log = EventLog(calls)
    app = make_base_app(
        kind.title,
        _DESCRIPTION,
        kind.prefix,
        lambda: read_families(calls, kind.prefix),
        token=token,
        max_body=_MAX_BODY,
        errors={RequestValidationError: _invalid, RlframeError: _refused},
        refusal=_refusal,
        lifespan=life,
        without_token=_WITHOUT_TOKEN,
        page=PAGE,
        responses=REFUSED,
    )
    app.state.on_shutdown = log.close

    @app.get("/", response_model=dict[str, str], tags=["service"], responses=REFUSED)
    async def root() -> Response:
        """Return the title of the service. A request that accepts text/html gets the live page."""
        return answer({"message": kind.title})

    app.include_router(reading_router(calls, log), responses=REFUSED)
    app.include_router(command_router(calls, kind.commands), responses=REFUSED)
    return app


def _refusal(error: str, status: int, headers: dict[str, str] | None = None, *, field: str | None = None) -> Response:
    """Return an error response: `{"error": {"type", "message", "field"}}`. See `rlframe.http.bodies.Refusal`."""
    if status == 503:
        headers = {"Retry-After": str(_RETRY_AFTER), **(headers or {})}
    content = {"type": _TYPES.get(status, "error"), "message": error, "field": field}
    return answer({"error": content}, status, headers)


def _refused(error: RlframeError) -> Response:
    """Return the response for an exception of the target."""
    if isinstance(error, FieldError):
        return _refusal(str(error), 422, field=error.field)
    return _refusal(str(error), 409 if isinstance(error, UsageError) else 503)


def _invalid(error: RequestValidationError) -> Response:
    """Return the response to an invalid request, without the request's content, which may be long."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return _refusal("The body is not valid JSON.", 422)
    field = ".".join(str(part) for part in first["loc"][1:])[:100] or None
    named = f"{field}: " if field else ""
    return _refusal(f"{named}{first['msg']}.", 422, field=field)
