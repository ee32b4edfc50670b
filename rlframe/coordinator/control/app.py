"""The FastAPI application in front of a coordinator, or of a run without one.

See `rlframe.coordinator.control.serving` for how it is run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import rlframe
from rlframe.coordinator.control.calls import Calls
from rlframe.coordinator.control.endpoints import REFUSED, command_router, reading_router
from rlframe.coordinator.control.errors import content, refusal, refused
from rlframe.coordinator.control.events import EventLog
from rlframe.coordinator.control.prometheus import Metrics
from rlframe.errors import RlframeError
from rlframe.http.measuring import Measure
from rlframe.http.middleware import Compress, ReadBody, RequireToken, answer
from rlframe.http.origins import SameOrigin
from rlframe.http.page import Page

PAGE = pathlib.Path(__file__).with_name("page.html")  # asks for /status and /events/stream
_MAX_BODY = 1 << 20
_OPEN = ("/healthz",)  # without a token
_DESCRIPTION = """Watches and steers a run. `GET /` is a page that does so in a browser."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What an application is about."""

    title: str
    prefix: str  # of its metrics
    commands: tuple[str, ...]  # that it offers, by the methods of the target


COORDINATOR = Kind(
    "rlframe coordinator",
    "rlframe_coordinator_",
    ("cancel", "pause", "resume", "scale", "evaluate_now", "checkpoint", "restore"),
)
RUN = Kind("rlframe run", "rlframe_run_", ("cancel",))  # without a coordinator


def make_app(
    target: Any,
    token: str | None = None,
    *,
    kind: Kind = COORDINATOR,
) -> FastAPI:
    """The application.

    Args:
        target: an object with the coordinator's methods, which may block: `status`, `events`, and the commands of
            `kind`. Where it is away (`PeerError`, `UnavailableError`) requests are answered with 503, and the
            application goes on.
        token: that requests carry, but for the page's static file and /healthz; None: none is needed.
        kind: of what is shown.

    `app.state.let_go()` ends the event streams, so that a server that ends need not wait for their readers.
    """
    calls, metrics = Calls(target), Metrics(kind.prefix)

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        following = asyncio.create_task(log.follow())
        try:
            yield
        finally:
            log.close()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    app = FastAPI(
        title=kind.title,
        version=rlframe.__version__,
        description=_DESCRIPTION,
        lifespan=life,
        strict_content_type=False,  # CSRF is what SameOrigin is there for
    )
    log = EventLog(calls)
    app.state.let_go = log.close

    @app.get("/", response_model=dict[str, str], tags=["service"], responses=REFUSED)
    async def root() -> Response:
        """That the service is there. A browser, which asks for text/html, gets the live page."""
        return answer({"message": kind.title})

    app.include_router(reading_router(calls, log, metrics), responses=REFUSED)
    app.include_router(command_router(calls, kind.commands), responses=REFUSED)
    _handle_errors(app)
    # The last one added is the first that a request meets.
    app.add_middleware(Compress)
    app.add_middleware(ReadBody, limit=_MAX_BODY, refusal=refusal)
    if token is not None:
        app.add_middleware(_TokenButOpen, token=token)
    app.add_middleware(Page, file=PAGE)
    app.add_middleware(SameOrigin, token=token is not None, refusal=refusal)
    app.add_middleware(Measure, metrics=metrics)
    return app


class _TokenButOpen:
    """`RequireToken`, but for what says no more than that the service is there."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._guarded = app, RequireToken(app, token, refusal)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app if scope.get("path") in _OPEN else self._guarded
        await app(scope, receive, send)


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid_request(_: Request, error: RequestValidationError) -> Response:
        # Without what was sent: it may be long, or hold what JSON does not have.
        first = error.errors()[0]
        path = [str(part) for part in first["loc"][1:]]
        if first["type"] == "json_invalid":
            return answer(content("The body is no valid JSON.", 422), 422)
        field = ".".join(path)[:100] or None
        named = f"{field}: " if field else ""
        return answer(content(f"{named}{first['msg']}.", 422, field), 422)

    @app.exception_handler(RlframeError)
    async def raised(_: Request, error: RlframeError) -> Response:
        return refused(error)

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:100]}: {error.detail}. The endpoints are described at /docs."
        return refusal(message, error.status_code, dict(error.headers or {}))
