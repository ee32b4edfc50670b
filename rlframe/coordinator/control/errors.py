"""How the control API refuses: `{"error": {"type", "message", "field"}}`, with a status that says whose turn it is."""

from __future__ import annotations

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


def refusal(error: str, status: int, headers: dict[str, str] | None = None, *, field: str | None = None) -> Response:
    """As `rlframe.http.bodies.Refusal`; `field` of the request is wrong."""
    if status == 503:
        headers = {"Retry-After": str(RETRY_AFTER), **(headers or {})}
    content = {"type": _TYPES.get(status, "error"), "message": error, "field": field}
    return answer({"error": content}, status, headers)


def refused(error: RlframeError) -> Response:
    """Answer a call that raised."""
    if isinstance(error, FieldError):
        return refusal(str(error), 422, field=error.field)
    return refusal(str(error), 409 if isinstance(error, UsageError) else 503)
