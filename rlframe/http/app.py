"""The common part of the applications of all services: middleware, answers to errors, and pages.

Pages are static files that load nothing from other sites. Their data comes from the service.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import rlframe
from rlframe.http.access import RequireToken, SameOrigin
from rlframe.http.bodies import ReadBody, Refusal, detail
from rlframe.http.measuring import Measure, ReadFamilies, RequestMetrics

_DOCS = pathlib.Path(__file__).with_name("docs.html")  # asks for /openapi.json
_TEXT = {"content": {"text/plain": {"schema": {"type": "string"}}}}


def make_app(
    title: str,
    description: str,
    metrics_prefix: str,
    read_families: ReadFamilies,
    *,
    token: str | None,
    max_body: int,
    errors: Mapping[type[Exception], Callable[[Any], Response]],
    refusal: Refusal | None = None,
    lifespan: Any = None,
    no_token: bool = False,
    hosts: Iterable[str] = (),
    origins: Iterable[str] = (),
    without_token: tuple[str, ...] = (),
    raw: tuple[str, ...] = (),
    changing: tuple[str, ...] = (),
    page: pathlib.Path | None = None,
    stripped: str = "",
    responses: dict[int | str, dict[str, Any]] | None = None,
) -> FastAPI:
    """Make an application whose only endpoints are /metrics, /openapi.json and /docs, which shows the latter.

    Args:
        metrics_prefix: of the names at /metrics.
        read_families: returns the service's numbers for /metrics, which also has the durations of requests.
        stripped: as for `Measure`.
        responses: documented refusals of /metrics.
        token: that requests carry, but for the page and the paths `without_token`; None: none is needed.
        max_body: bytes of a request, also decompressed; endpoints at the paths `raw` read it themselves.
        errors: how exceptions of endpoints are answered.
        refusal: what refusals look like, also of unknown paths; None: as FastAPI's.
        no_token, hosts, origins, changing: as for `SameOrigin`. Pages of `origins` may read answers, too.
        page: the live page at /.
    """
    app = FastAPI(
        title=title,
        version=rlframe.__version__,
        description=description,
        lifespan=lifespan,
        strict_content_type=False,  # CSRF is what SameOrigin is there for
        docs_url=None,  # FastAPI's own loads scripts from another site
        redoc_url=None,
    )
    app.get("/docs", include_in_schema=False)(describe_endpoints)
    metrics = RequestMetrics(metrics_prefix)

    @app.get("/metrics", tags=["service"], response_class=Response, responses={200: _TEXT, **(responses or {})})
    async def read_metrics() -> Response:
        """The state of the service and durations of requests, as Prometheus reads them."""
        # Written in a thread: the text of many runs takes long.
        return await asyncio.to_thread(metrics.response, await read_families())

    for kind, respond in errors.items():
        app.add_exception_handler(kind, _handler(respond))
    if refusal is not None:
        app.add_exception_handler(HTTPException, _no_such_path(refusal))
    refuse = refusal or detail
    # The last one added is the first that a request meets.
    # Level 1: on these numbers a twentieth larger than level 9, in a tenth of the time; large answers beside the loop.
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=1, thread_minimum_size=64 << 10)
    app.add_middleware(ReadBody, limit=max_body, raw=raw, refusal=refuse)
    if token is not None:
        app.add_middleware(RequireToken, token=token, refusal=refuse, without=without_token)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    if page is not None:
        app.add_middleware(Page, file=page)
    app.add_middleware(
        SameOrigin,
        token=token is not None,
        no_token=no_token,
        hosts=hosts,
        origins=origins,
        changing=changing,
        refusal=refuse,
    )
    app.add_middleware(Measure, metrics=metrics, stripped=stripped)
    return app


def _handler(respond: Callable[[Any], Response]) -> Any:
    async def handler(_: Request, error: Exception) -> Response:
        return respond(error)

    return handler


def _no_such_path(refusal: Refusal) -> Any:
    async def handler(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:100]}: {error.detail}. The endpoints are described at /docs."
        return refusal(message, error.status_code, dict(error.headers or {}))

    return handler


class Page:
    """ASGI: answers requests for / that accept text/html with the page, and passes on all others.

    The page holds no data, so it needs no token: it asks its reader for one.

    Args:
        file: the page, with one `<script>` and one `<style>`.
    """

    def __init__(self, app: ASGIApp, file: pathlib.Path) -> None:
        self._app = app
        self._response = _response(file)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD")
        if asked and "text/html" in Headers(scope=scope).get("accept", ""):
            await self._response(scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def describe_endpoints() -> Response:
    """Show the endpoints, as /openapi.json has them."""
    return _response(_DOCS)


def _response(file: pathlib.Path) -> Response:
    html = file.read_text(encoding="utf-8")
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": _policy(html),
        "Referrer-Policy": "no-referrer",
        "Vary": "Accept",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(html, headers=headers, media_type="text/html")


def _policy(html: str) -> str:
    """Return the policy: only the page's own script and style, and requests to its own service."""
    sources = {"default": "'none'", "connect": "'self'", "img": "data:"}
    for name in ("script", "style"):
        (content,) = re.findall(rf"<{name}>(.*?)</{name}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        sources[name] = f"'sha256-{digest}'"
    listed = "; ".join(f"{name}-src {source}" for name, source in sources.items())
    return f"{listed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
