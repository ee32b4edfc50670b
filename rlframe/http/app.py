"""The common parts of the services' web applications: middleware, error responses, pages and metrics.

Pages are static files that load nothing from other sites. They request their data from the service.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import pathlib
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, GCCollector, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import rlframe
from rlframe.http.access import RequireToken, SameOrigin
from rlframe.http.bodies import ReadBody, Refusal, detail

_DOCS = pathlib.Path(__file__).with_name("docs.html")  # shows /openapi.json
_TEXT = {"content": {"text/plain": {"schema": {"type": "string"}}}}
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)  # seconds
_METHODS = ("GET", "HEAD", "POST", "OPTIONS")

Table = Iterable[tuple[str, str, str]]  # (name, help text, key) of each metric
# A function that returns the service's metrics. It runs on the event loop.
ReadFamilies = Callable[[], Awaitable[Iterable[Metric]]]


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
    """Make an application with the endpoints /metrics, /openapi.json and /docs, which shows /openapi.json.

    Args:
        metrics_prefix: Prefix of the metrics' names.
        read_families: Returns the service's metrics. /metrics adds the durations of requests.
        token: Bearer token that requests must carry, except for the page and the paths in `without_token`. None means
            that no token is needed.
        max_body: Largest size of a request body in bytes, also after decompression.
        errors: Exception type -> function that creates the response when an endpoint raises such an exception.
        refusal: Creates the response to a refused request or an unknown path. None means FastAPI's format.
        no_token, hosts, origins, changing: See `SameOrigin`. Pages of `origins` may also read responses.
        raw: See `ReadBody`.
        page: File of the live page at /.
        stripped: See `MeasureRequests`.
        responses: Documentation of the error responses of /metrics.
    """
    app = FastAPI(
        title=title,
        version=rlframe.__version__,
        description=description,
        lifespan=lifespan,
        strict_content_type=False,  # SameOrigin protects against CSRF
        docs_url=None,  # do not use FastAPI's page, which loads scripts from another site
        redoc_url=None,
    )
    app.get("/docs", include_in_schema=False)(show_endpoints)
    metrics = RequestMetrics(metrics_prefix)

    @app.get("/metrics", tags=["service"], response_class=Response, responses={200: _TEXT, **(responses or {})})
    async def read_metrics() -> Response:
        """Metrics of the service and durations of requests, in Prometheus's text format."""
        # Use a thread, because formatting the metrics of many runs takes a long time.
        return await asyncio.to_thread(metrics.response, await read_families())

    for kind, respond in errors.items():
        app.add_exception_handler(kind, _handler(respond))
    if refusal is not None:
        app.add_exception_handler(HTTPException, _http_exception_handler(refusal))
    refuse = refusal or detail
    # A request passes through the middleware in the reverse order of these calls.
    # Use gzip level 1. Compared with level 9, it takes a tenth of the time, and its output is only 5 % larger. Large
    # responses are compressed in a thread.
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=1, thread_minimum_size=64 << 10)
    app.add_middleware(ReadBody, limit=max_body, raw=raw, refusal=refuse)
    if token is not None:
        app.add_middleware(RequireToken, token=token, refusal=refuse, without=without_token)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    if page is not None:
        app.add_middleware(LivePage, file=page)
    app.add_middleware(
        SameOrigin,
        token=token is not None,
        no_token=no_token,
        hosts=hosts,
        origins=origins,
        changing=changing,
        refusal=refuse,
    )
    app.add_middleware(MeasureRequests, metrics=metrics, stripped=stripped)
    return app


def _handler(respond: Callable[[Any], Response]) -> Any:
    async def handler(_: Request, error: Exception) -> Response:
        return respond(error)

    return handler


def _http_exception_handler(refusal: Refusal) -> Any:
    async def handler(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:100]}: {error.detail}. The endpoints are described at /docs."
        return refusal(message, error.status_code, dict(error.headers or {}))

    return handler


class LivePage:
    """ASGI middleware that sends the live page to a browser: the path is / and the request accepts text/html.

    All other requests go to the application. The page needs no token, because it contains no data. The page asks the
    user for the token.

    Args:
        file: HTML file with exactly one `<script>` and one `<style>`.
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


async def show_endpoints() -> Response:
    """Return the page that lists the endpoints of /openapi.json."""
    return _response(_DOCS)


def _response(file: pathlib.Path) -> Response:
    html = file.read_text(encoding="utf-8")
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": _content_security_policy(html),
        "Referrer-Policy": "no-referrer",
        "Vary": "Accept",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(html, headers=headers, media_type="text/html")


def _content_security_policy(html: str) -> str:
    """Return a Content-Security-Policy that allows only the page's script and style, and requests to the service."""
    sources = {"default": "'none'", "connect": "'self'", "img": "data:"}
    for name in ("script", "style"):
        (content,) = re.findall(rf"<{name}>(.*?)</{name}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        sources[name] = f"'sha256-{digest}'"
    listed = "; ".join(f"{name}-src {source}" for name, source in sources.items())
    return f"{listed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


# --- Prometheus metrics: the service's own metrics, durations of requests, and the resources of the process


class RequestMetrics:
    """Metrics about the durations of requests and about the process.

    Args:
        prefix: Prefix of the metrics' names.
    """

    def __init__(self, prefix: str) -> None:
        self._registry = CollectorRegistry()
        self.requests = Histogram(
            prefix + "request_duration_seconds",
            "Seconds from the headers of a request to the end of its response.",
            ("method", "endpoint", "status"),
            buckets=_BUCKETS,
            registry=self._registry,
        )
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)

    def response(self, families: Iterable[Metric]) -> Response:
        """Return `families` and this object's metrics in Prometheus's text format 0.0.4. Any thread may call this."""
        text = generate_latest(_Families(families)) + generate_latest(self._registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def metric_families(prefix: str, counters: Table, gauges: Table, read: Callable[[str], Any]) -> Iterator[Metric]:
    """Yield a metric with the value `read(key)` for each row of the tables. Skip a row if its value is None."""
    for family, table in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
        for name, help_text, key in table:
            if (value := read(key)) is not None:
                yield family(prefix + name, help_text, value)


class MeasureRequests:
    """ASGI middleware that measures the duration of requests by method, endpoint and status.

    Args:
        stripped: Path prefix that is removed, so that paths with and without the prefix have the same metric.
    """

    def __init__(self, app: ASGIApp, metrics: RequestMetrics, stripped: str = "") -> None:
        self._app = app
        self._histogram = metrics.requests
        self._stripped = stripped
        self._children: dict[tuple[str, str, int], Any] = {}  # a cache, because `Histogram.labels` is slow

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500  # the status if the application raises before it responds

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        start = time.perf_counter()
        try:
            await self._app(scope, receive, send_and_note_status)
        finally:
            self._child(scope, status).observe(time.perf_counter() - start)

    def _child(self, scope: Scope, status: int) -> Any:
        # Use the route as the label. With the request's path as the label, clients could create any number of labels.
        route = scope.get("route")
        endpoint = "other" if route is None else route.path.removeprefix(self._stripped)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        key = (method, endpoint, status)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._histogram.labels(method, endpoint, str(status))
        return child
