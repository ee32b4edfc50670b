"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from rlframe.errors import RlframeError, UnavailableError, suggest
from rlframe.http.bodies import answer

_TYPES = {
    401: "authentication_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
RETRY = {"Retry-After": "1"}  # header of an error response if the client can retry the request
_NO_FIELDS = ("body", "vllm", "sglang")  # parts of pydantic's error locations that are not field names


class RefusedError(RlframeError):
    """An error with an HTTP status and a message, which the server sends as the response to a request."""

    def __init__(
        self,
        message: str,
        status: int,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def response(self) -> Response:
        return answer(self.content, self.status, self.headers)

    @property
    def content(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refused(error: RlframeError) -> RefusedError:
    """Convert an error of the engine or of the configuration to a `RefusedError`."""
    if isinstance(error, RefusedError):
        return error
    status, headers = (503, RETRY) if isinstance(error, UnavailableError) else (400, None)
    return RefusedError(str(error), status, headers=headers)


def refusal(error: str, status: int, headers: dict[str, str] | None = None) -> Response:
    """Make an error response; see `rlframe.http.bodies.Refusal`."""
    return RefusedError(error, status, headers=headers).response


def invalid(error: RequestValidationError, known: list[str]) -> RefusedError:
    """Convert a validation error of a body to one sentence."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part not in _NO_FIELDS)
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        return RefusedError(f"There is no option {name!r}.{suggest(name, known)}", 400, param=where)
    if first["type"] == "json_invalid":
        return RefusedError(f"The body is not valid JSON: {first['ctx']['error']}.", 400)
    return RefusedError(f"{where}: {first['msg']}." if where else first["msg"], 400, param=where or None)
