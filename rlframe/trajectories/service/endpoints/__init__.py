"""The endpoints of atroposlib's server, with optional extensions. This module contains their shared code."""

from __future__ import annotations

from typing import Annotated, Any, Union

from fastapi import Header, Path, Request
from starlette.responses import Response

from rlframe.http.bodies import answer
from rlframe.trajectories.service import models
from rlframe.trajectories.service.service import Service

DEFAULT_RUN = "default"
MAX_NAME = 200  # maximum number of characters in a key or in a consumer's name

INVALID: dict[int | str, dict[str, Any]] = {422: {"model": models.Invalid, "description": "A field is invalid."}}
UNAVAILABLE: dict[int | str, dict[str, Any]] = {
    503: {"model": models.Failure, "description": "Unavailable. Retry after Retry-After seconds."}
}
WRITES = INVALID | UNAVAILABLE
REFUSED: dict[int | str, dict[str, Any]] = {  # answers of the middleware, before a request reaches an endpoint
    400: {"model": models.Refusal, "description": "The body cannot be read or decompressed."},
    401: {"model": models.Refusal, "description": "The request lacks the service's token."},
    408: {"model": models.Refusal, "description": "The body did not arrive in time."},
    413: {"model": models.Refusal, "description": "The body is too large."},
    415: {"model": models.Refusal, "description": "The encoding of the body is unknown."},
}


def run_of(request: Request) -> str:
    return request.path_params.get("run", DEFAULT_RUN)


def service_of(request: Request) -> Service:
    return request.app.state.service


async def check_run_name(
    run: Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="Name of the run.")],
) -> None:
    """Refuse invalid names of runs."""


def invalid(loc: tuple[str | int, ...], message: str, kind: str = "value_error") -> Response:
    """Return an answer with status 422 in FastAPI's format."""
    return answer({"detail": [{"loc": list(loc), "msg": message, "type": kind}]}, 422)


REPLAYED = {"Idempotent-Replayed": "true"}  # header of a repeated answer to a request with a repeated key
IdempotencyKey = Annotated[
    Union[str, None],
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=MAX_NAME,
        description="Key chosen by the client. A repeated key gets the first answer, and changes nothing.",
    ),
]


def raw_body(schema: dict[str, Any], *content_types: str, required: bool = True) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that reads its body itself."""
    types = content_types or ("application/json", "application/msgpack")
    return {"requestBody": {"required": required, "content": {kind: {"schema": schema} for kind in types}}}
