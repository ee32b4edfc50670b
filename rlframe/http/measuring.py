"""Metrics for Prometheus: a service's own numbers, how long requests take, and what the process needs."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)  # seconds
_METHODS = ("GET", "HEAD", "POST", "OPTIONS")

Table = Iterable[tuple[str, str, str]]  # name, help, and key of each number
ReadFamilies = Callable[[], Awaitable[Iterable[Metric]]]  # reads a service's own numbers, on the event loop


class RequestMetrics:
    """The requests and the process of one application.

    Args:
        prefix: of the names.
    """

    def __init__(self, prefix: str) -> None:
        self._registry = CollectorRegistry()
        self.requests = Histogram(
            prefix + "request_duration_seconds",
            "From the headers of a request to the end of its answer.",
            ("method", "endpoint", "status"),
            buckets=_BUCKETS,
            registry=self._registry,
        )
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)

    def response(self, families: Iterable[Metric]) -> Response:
        """`families`, and these, in Prometheus's text format 0.0.4. May be called in any thread."""
        text = generate_latest(_Families(families)) + generate_latest(self._registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def numbers(prefix: str, counters: Table, gauges: Table, read: Callable[[str], Any]) -> Iterator[Metric]:
    """Yield a metric for each row of the tables; `read(key)` returns its value, None if there is none."""
    for family, table in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
        for name, help_text, key in table:
            if (value := read(key)) is not None:
                yield family(prefix + name, help_text, value)


class Measure:
    """ASGI: measures the duration of requests, by method, endpoint and status.

    Args:
        stripped: a prefix of paths that is left out: the same endpoints exist without it.
    """

    def __init__(self, app: ASGIApp, metrics: RequestMetrics, stripped: str = "") -> None:
        self._app = app
        self._histogram = metrics.requests
        self._stripped = stripped
        self._children: dict[tuple[str, str, int], Any] = {}  # `labels` takes longer than all the rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500  # of a request that ends without an answer

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        start = time.perf_counter()
        try:
            await self._app(scope, receive, noting)
        finally:
            self._child(scope, status).observe(time.perf_counter() - start)

    def _child(self, scope: Scope, status: int) -> Any:
        # The route, not the path of the request: clients must not be able to make labels.
        route = scope.get("route")
        endpoint = "other" if route is None else route.path.removeprefix(self._stripped)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        key = (method, endpoint, status)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._histogram.labels(method, endpoint, str(status))
        return child
