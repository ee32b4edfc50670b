"""How the control API refuses: `{"error": {"type", "message", "field"}}`, with a status that says whose turn it is."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from rlframe.errors import RlframeError, UsageError
from rlframe.http.bodies import answer

RETRY_AFTER = 1  # seconds, of a 503
_TYPES = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    422: "invalid",
    503: "unavailable",
}


class FieldError(UsageError):
    """A field of a request that cannot be. `field` names it."""

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(message)
        self.field = field


class ConflictError(UsageError):
    """The state that the job is in does not allow the request."""


def content(message: str, status: int, field: str | None = None) -> dict[str, Any]:
    """The body of a refusal."""
    return {"error": {"type": _TYPES.get(status, "error"), "message": message, "field": field}}


def refusal(error: str, status: int, headers: dict[str, str] | None = None) -> Response:
    """As `rlframe.http.bodies.Refusal`."""
    if status == 503:
        headers = {"Retry-After": str(RETRY_AFTER), **(headers or {})}
    return answer(content(error, status), status, headers)


def refused(error: RlframeError) -> Response:
    """Answer a call that raised."""
    if isinstance(error, FieldError):
        return answer(content(str(error), 422, error.field), 422)
    return refusal(str(error), 409 if isinstance(error, UsageError) else 503)
