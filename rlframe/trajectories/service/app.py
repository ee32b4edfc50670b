"""The FastAPI application of the trajectory service."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import sys
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import Response

import rlframe
from rlframe.errors import PeerError, StoreError, UnavailableError, UsageError
from rlframe.http.measuring import Measure, RequestMetrics
from rlframe.http.middleware import Compress, ReadBody, RequireToken, answer, retry_later
from rlframe.http.origins import SameOrigin
from rlframe.http.page import Page
from rlframe.http.token_file import no_token_means
from rlframe.trajectories.service import models
from rlframe.trajectories.service.endpoints import (
    REFUSED,
    InvalidHeaderError,
    batches,
    envs,
    groups,
    invalid,
    named_run,
    service_of,
    trainer,
)
from rlframe.trajectories.service.endpoints.live import live_router, metrics_router
from rlframe.trajectories.service.previews import load_decode
from rlframe.trajectories.service.prometheus import PREFIX
from rlframe.trajectories.service.service import Service
from rlframe.trajectories.service.settings import CAN, Settings
from rlframe.trajectories.service.validation import InvalidGroupError
from rlframe.trajectories.stores import open_store

PAGE = pathlib.Path(__file__).with_name("page.html")  # asks for /report and /previews
_CHANGING = ("/batch", "/reset_data")  # by GET
_DESCRIPTION = """Stands between environments, which send groups of sequences, and trainers, which pull batches of them.

Every path is there for the run `default`, and as `/runs/{run}/…` for any number of others."""


def make_app(settings: Settings, service: Service | None = None) -> FastAPI:
    """The application. It opens the store when it starts, unless it is given a restored service, and closes it."""
    token = settings.token()
    decode = load_decode(settings.tokenizer)
    metrics = RequestMetrics(PREFIX)

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = service or await asyncio.to_thread(open_service, settings)
        await app.state.service.start()
        try:
            yield
        finally:
            await app.state.service.close()

    app = FastAPI(
        title="rlframe trajectories",
        version=rlframe.__version__,
        description=_DESCRIPTION,
        lifespan=life,
        strict_content_type=False,  # CSRF is what SameOrigin is there for
    )
    app.get("/", response_model=models.Root, tags=["service"])(_root)
    app.get("/runs", response_model=models.Runs, tags=["service"])(_runs)
    app.include_router(metrics_router(metrics), responses=REFUSED)
    # What is asked for most often comes first: the others are looked at one by one until one matches.
    routers = [groups.router, batches.router, envs.router, trainer.router, trainer.reset_router(settings.reset)]
    for router in [*routers, live_router(decode)]:
        app.include_router(router, responses=REFUSED)
        app.include_router(router, prefix="/runs/{run}", dependencies=[Depends(named_run)], responses=REFUSED)
    _handle_errors(app)
    # The last one added is the first that a request meets.
    app.add_middleware(Compress)
    app.add_middleware(ReadBody, limit=settings.max_body_mb << 20, raw=groups.RAW)
    if token is not None:
        app.add_middleware(RequireToken, token=token)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Page, file=PAGE)
    app.add_middleware(
        SameOrigin,
        token=token is not None,
        no_token=settings.no_token,
        hosts=settings.allowed_hosts,
        origins=settings.cors_origins,
        changing=_CHANGING,
    )
    app.add_middleware(Measure, metrics=metrics, stripped="/runs/{run}")
    return app


def app_from_environment() -> FastAPI:
    """The application, for `uvicorn --factory`, with its settings from the environment (see `Settings`)."""
    settings = Settings.from_environment()
    if settings.no_token:
        print(no_token_means(CAN), file=sys.stderr)
    return make_app(settings)


def open_service(settings: Settings) -> Service:
    """Make the service, with what the store holds. Raises as `open_store` and `Service.restore`."""
    store = open_store(settings.store)
    service = Service(store, max_bytes=settings.max_queue_mb << 20)
    try:
        service.restore()
    except BaseException:
        store.close()
        raise
    return service


async def _root() -> Response:
    """That the service is there. A browser, which asks for text/html, gets the live page."""
    return answer({"message": "rlframe trajectories"})


async def _runs(request: Request) -> Response:
    """The runs that there are."""
    return answer({"runs": service_of(request).runs})


def _message(error: dict[str, Any]) -> str:
    """What pydantic says, or an error of ours, in its own words."""
    return str(error.get("ctx", {}).get("error", error["msg"]))


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid_request(_: Request, error: RequestValidationError) -> Response:
        # Without what was sent: it may be long, or hold what JSON does not have.
        details = [{"loc": list(one["loc"]), "msg": _message(one), "type": one["type"]} for one in error.errors()]
        return answer({"detail": details}, 422)

    @app.exception_handler(InvalidGroupError)
    async def invalid_group(_: Request, error: InvalidGroupError) -> Response:
        return invalid(("body", *error.loc), str(error), error.kind)

    @app.exception_handler(InvalidHeaderError)
    async def invalid_header(_: Request, error: InvalidHeaderError) -> Response:
        return invalid(("header", error.header), str(error))

    @app.exception_handler(UsageError)
    async def invalid_value(_: Request, error: UsageError) -> Response:
        return invalid(("body",), str(error))

    @app.exception_handler(UnavailableError)
    async def unavailable(_: Request, error: UnavailableError) -> Response:
        return retry_later(str(error))

    @app.exception_handler(PeerError)
    async def unanswered(_: Request, error: PeerError) -> Response:
        return retry_later(str(error), "failure")

    @app.exception_handler(StoreError)
    async def failed(_: Request, error: StoreError) -> Response:
        return retry_later(str(error), "failure", 10)
