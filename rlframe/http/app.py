"""The common part of the applications of all services: middleware, and answers to errors."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response

import rlframe
from rlframe.http.measuring import Measure, RequestMetrics
from rlframe.http.middleware import ReadBody, Refusal, RequireToken, detail
from rlframe.http.origins import SameOrigin
from rlframe.http.page import Page, describe_endpoints


def make_app(title: str, description: str, lifespan: Any = None) -> FastAPI:
    """An application whose only endpoints are /openapi.json and /docs, which shows it."""
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
    return app


def protect(
    app: FastAPI,
    metrics: RequestMetrics,
    *,
    max_body: int,
    token: str | None,
    no_token: bool = False,
    hosts: Iterable[str] = (),
    origins: Iterable[str] = (),
    refusal: Refusal = detail,
    without_token: tuple[str, ...] = (),
    raw: tuple[str, ...] = (),
    changing: tuple[str, ...] = (),
    page: pathlib.Path | None = None,
    stripped: str = "",
) -> None:
    """Put before the endpoints what every request passes.

    Args:
        metrics: note how long requests take; `stripped` as for `Measure`.
        max_body: bytes of a request, also decompressed; endpoints at the paths `raw` read it themselves.
        token: that requests carry, but for the page and the paths `without_token`; None: none is needed.
        no_token, hosts, origins, changing: as for `SameOrigin`. Pages of `origins` may read answers, too.
        refusal: what refusals look like.
        page: the live page at /.
    """
    # The last one added is the first that a request meets.
    # Level 1: on these numbers a twentieth larger than level 9, in a tenth of the time; large answers beside the loop.
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=1, thread_minimum_size=64 << 10)
    app.add_middleware(ReadBody, limit=max_body, raw=raw, refusal=refusal)
    if token is not None:
        app.add_middleware(RequireToken, token=token, refusal=refusal, without=without_token)
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
        refusal=refusal,
    )
    app.add_middleware(Measure, metrics=metrics, stripped=stripped)


def answer_errors(
    app: FastAPI, answers: Mapping[type[Exception], Callable[[Any], Response]], refusal: Refusal | None = None
) -> None:
    """Answer what endpoints raise; by `refusal`, where it is given, also requests for what is not there."""

    def handle(kind: type[Exception], respond: Callable[[Any], Response]) -> None:
        async def handler(_: Request, error: Exception) -> Response:
            return respond(error)

        app.add_exception_handler(kind, handler)

    for kind, respond in answers.items():
        handle(kind, respond)
    if refusal is not None:

        @app.exception_handler(HTTPException)
        async def no_such_path(request: Request, error: HTTPException) -> Response:
            path = request.url.path[:100]
            message = f"{request.method} {path}: {error.detail}. The endpoints are described at /docs."
            return refusal(message, error.status_code, dict(error.headers or {}))
