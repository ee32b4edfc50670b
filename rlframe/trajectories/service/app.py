"""The FastAPI application of the trajectory service, and the server that runs it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

import msgspec
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from rlframe import handles
from rlframe.errors import PeerError, StoreError, UnavailableError, UsageError, suggest
from rlframe.http.app import make_app as make_base_app
from rlframe.http.bodies import answer, retry_later
from rlframe.http.config import read_token, warn_no_token
from rlframe.http.serving import ServerThread
from rlframe.trajectories.config import Settings
from rlframe.trajectories.service.endpoints import (
    REFUSED,
    check_run_name,
    data,
    invalid,
    live,
    registration,
    service_of,
)
from rlframe.trajectories.service.endpoints.live import PREFIX
from rlframe.trajectories.service.models import load_decode
from rlframe.trajectories.service.service import Service
from rlframe.trajectories.service.validation import InvalidGroupError
from rlframe.trajectories.stores import open_store

VARIABLE_PREFIX = "RLFRAME_TRAJECTORIES_"  # prefix of the environment variables for uvicorn
PAGE = pathlib.Path(__file__).with_name("page.html")  # the live page, which requests /report and /previews
_CHANGING_GETS = ("/batch", "/reset_data")  # GET requests that change state
_DESCRIPTION = """Environments send groups of sequences, and trainers pull batches of them.

Every path exists for the run `default`, and as `/runs/{run}/…` for any other run."""


def make_app(settings: Settings, service: Service | None = None) -> FastAPI:
    """Return the application. If `service` is None, the startup creates one. The shutdown closes the service."""

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = service or await asyncio.to_thread(open_service, settings)
        await app.state.service.start()
        try:
            yield
        finally:
            await app.state.service.close()

    app = make_base_app(
        "rlframe trajectories",
        _DESCRIPTION,
        PREFIX,
        lambda: live.read_families(app.state.service),
        token=read_token(settings.token_file),
        max_body=settings.max_body_mb << 20,
        errors={
            RequestValidationError: _invalid_request,
            InvalidGroupError: lambda error: invalid(("body", *error.loc), str(error), error.kind),
            UsageError: lambda error: invalid(("body",), str(error)),
            UnavailableError: lambda error: retry_later(str(error)),
            PeerError: lambda error: retry_later(str(error), "failure"),
            StoreError: lambda error: retry_later(str(error), "failure", 10),
        },
        lifespan=life,
        no_token=settings.no_token,
        hosts=settings.allowed_hosts,
        origins=settings.cors_origins,
        raw=data.RAW,
        changing=_CHANGING_GETS,
        page=PAGE,
        stripped="/runs/{run}",
        responses=REFUSED,
    )
    app.state.decode, app.state.reset = load_decode(settings.tokenizer), settings.reset
    app.get("/", response_model=dict[str, str], tags=["service"])(_root)
    app.get("/runs", response_model=dict[str, list[str]], tags=["service"])(_runs)
    # Routes are tried one by one, so the routes of the most frequent requests come first.
    for router in (data.batch_router, data.group_router, registration.env_router, registration.router, live.router):
        app.include_router(router, responses=REFUSED)
        app.include_router(router, prefix="/runs/{run}", dependencies=[Depends(check_run_name)], responses=REFUSED)
    return app


def app_from_environment() -> FastAPI:
    """Return the application of `rlframe.trajectories.server`. Settings come from environment variables."""
    settings = settings_from_variables(os.environ)
    warn_no_token(settings.no_token, settings.can)
    return make_app(settings)


def settings_from_variables(variables: Mapping[str, str]) -> Settings:
    """Return the settings from environment variables, without the address, which is an option of uvicorn.

    Raises:
        UsageError: A variable's name or value is not valid.
    """
    values: dict[str, Any] = {}
    of_uvicorn = ("host", "port", "max_connections")
    names, hints = {f.name: f for f in fields(Settings) if f.name not in of_uvicorn}, get_type_hints(Settings)
    for variable, text in variables.items():
        if not variable.startswith(VARIABLE_PREFIX):
            continue
        name = variable[len(VARIABLE_PREFIX) :].lower()
        if name not in names:
            known = [VARIABLE_PREFIX + known.upper() for known in names]
            raise UsageError(f"{variable} names no setting of the trajectory service.{suggest(variable, known)}")
        split = [part.strip() for part in text.split(",") if part.strip()]
        try:
            value = split if isinstance(names[name].default, tuple) else text
            values[name] = msgspec.convert(value, hints[name], strict=False)
        except msgspec.ValidationError as error:
            raise UsageError(f"{variable}: {error}; got {text!r}.") from None
    return Settings(**values)


def open_service(settings: Settings) -> Service:
    """Make the service, and restore its state from the store. Raise the errors of `open_store` and `restore`."""
    store = open_store(settings.store)
    service = Service(store, max_bytes=settings.max_queue_mb << 20)
    try:
        service.restore(settings.fresh)
    except BaseException:
        store.close()
        raise
    return service


async def _root() -> Response:
    """Confirm that the service runs. Browsers (Accept: text/html) get the live page instead."""
    return answer({"message": "rlframe trajectories"})


async def _runs(request: Request) -> Response:
    """List the runs."""
    return answer({"runs": service_of(request).runs})


def _invalid_request(error: RequestValidationError) -> Response:
    """Return an answer with status 422. It omits the received values, because they can be long or invalid in JSON."""
    details = [
        # For errors of rlframe, the message is in `ctx`. For errors of pydantic, it is in `msg`.
        {"loc": list(one["loc"]), "msg": str(one.get("ctx", {}).get("error", one["msg"])), "type": one["type"]}
        for one in error.errors()
    ]
    return answer({"detail": details}, 422)


_SHUTDOWN_TIMEOUT = 120.0  # seconds to finish requests and writes, and to save a snapshot


class TrajectoryServer:
    """A running trajectory service. It starts to answer requests when it is constructed, and ends at `stop()`.

    Args:
        settings: See `Settings`.

    Raises:
        UsageError: The address cannot be used, a token is required, or a setting is invalid.
        StoreError, PeerError: The store failed or did not answer (see `open_service`).

    Attributes:
        url: Address of the service.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._stop = settings, threading.Event()
        self._service = open_service(settings)
        self._service.on_failure = self.stop  # if the store fails, end the process so that a supervisor can restart it
        self._found_runs = list(_found_runs(self._service))
        try:
            app, on_shutdown = make_app(settings, self._service), self._service.stop_waiting
            self._server = ServerThread(
                app,
                settings.host,
                settings.port,
                settings.max_connections,
                on_shutdown=on_shutdown,
                ended=self.stop,
                end=_SHUTDOWN_TIMEOUT,
            )
        except BaseException:
            self._service.store.close()
            raise
        self.url = self._server.url

    def run(self) -> None:
        """Print the address and wait for `stop()`. Then answer unfinished requests and close the store.

        Raises:
            StoreError: The store failed. All acknowledged data is in the store.
        """
        warn_no_token(self._settings.no_token, self._settings.can)
        lines = [f"Trajectories at {self.url}  (endpoints: /docs)", self._service.store.durability, *self._found_runs]
        print("\n".join(lines), flush=True)
        with handles.stop_with_program(self.stop):
            self._stop.wait()
        self.close()
        if failure := self._service.failed or self._server.failure:
            raise failure

    def stop(self) -> None:
        """End `run()` after unfinished requests are answered. Any thread may call it."""
        self._stop.set()

    def close(self) -> None:
        """Stop the service, and wait for its end."""
        self.stop()
        self._server.close()


def _found_runs(service: Service) -> Iterator[str]:
    """Yield one line of text for each run that was found in the store at startup."""
    for run in service.runs:
        epoch, status = service.queue(run).epoch, service.queue(run).status()
        groups = status.queue_size + status.buffered + status.leased
        if epoch.registration is not None or groups:
            found = f"run {run!r} at step {status.current_step}, with {groups} groups"
            yield f"Found in the store: {found}. Start with --fresh to reset it."
