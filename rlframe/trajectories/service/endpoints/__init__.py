"""The endpoints: the published contract, and beside it what is opt-in. Here is what they share."""

from __future__ import annotations

from typing import Annotated, Any, Union

from fastapi import Header, Path, Request
from starlette.responses import Response

from rlframe.http.bodies import answer
from rlframe.trajectories.service import models
from rlframe.trajectories.service.service import Service

DEFAULT_RUN = "default"
MAX_NAME = 200  # characters of a key or a consumer's name

INVALID: dict[int | str, dict[str, Any]] = {422: {"model": models.Invalid, "description": "A field is wrong."}}
UNAVAILABLE: dict[int | str, dict[str, Any]] = {
    503: {"model": models.Failure, "description": "Not now: again after Retry-After seconds."}
}
WRITES = INVALID | UNAVAILABLE
REFUSED: dict[int | str, dict[str, Any]] = {  # before an endpoint sees the request
    400: {"model": models.Refusal, "description": "The body cannot be read, or not be decompressed."},
    401: {"model": models.Refusal, "description": "The service has a token, and this is not it."},
    408: {"model": models.Refusal, "description": "The body did not arrive in time."},
    413: {"model": models.Refusal, "description": "The body is too large."},
    415: {"model": models.Refusal, "description": "The body's encoding is not known."},
}


def run_of(request: Request) -> str:
    return request.path_params.get("run", DEFAULT_RUN)


def service_of(request: Request) -> Service:
    return request.app.state.service


async def check_run_name(
    run: Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="A namespace of its own.")],
) -> None:
    """Refuse what cannot be the name of a run."""


def invalid(loc: tuple[str | int, ...], message: str, kind: str = "value_error") -> Response:
    """422, as FastAPI answers it."""
    return answer({"detail": [{"loc": list(loc), "msg": message, "type": kind}]}, 422)


REPLAYED = {"Idempotent-Replayed": "true"}  # header of an answer that was given before
IdempotencyKey = Annotated[
    Union[str, None],
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=MAX_NAME,
        description="Chosen by the client: the same request again gets the first answer, and changes nothing.",
    ),
]


def raw_body(schema: dict[str, Any], *content_types: str, required: bool = True) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its body itself."""
    types = content_types or ("application/json", "application/msgpack")
    return {"requestBody": {"required": required, "content": {kind: {"schema": schema} for kind in types}}}
