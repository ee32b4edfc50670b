"""One request until it is answered: what is sent again, when, and what comes of it. No input or output of its own.

Both clients run the same coroutines. In a client that blocks, what they await is done when it returns: they end at
their first step, and nothing waits for an event loop.
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from rlframe import retry
from rlframe.errors import PeerError, RemoteError, TooOldError, UnavailableError, UsageError

JSON = "application/json"
MSGPACK = "application/msgpack"
POLL, LONGEST_POLL = 0.1, 1.0  # seconds between two looks at whether to go on, doubled in between

_NOT_NOW = (502, 503, 504)
_PAUSE, _LONGEST_PAUSE = 0.05, 5.0  # seconds before the first repetition and before a late one, doubled in between
_LEAST = 2.0  # seconds for an attempt, past the deadline where less is left: a busy service takes as long to say no
_SHOWN = 500  # characters of an answer that nobody expected

T = TypeVar("T")


@dataclass(frozen=True)
class HttpRequest:
    """What may be sent any number of times: each request of a client is idempotent, some by a key."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    patience: float = 0.0  # seconds that the service is asked to take


@dataclass(frozen=True)
class HttpReply:
    status: int
    headers: Mapping[str, str]  # lower case
    body: bytes

    @property
    def content(self) -> Any:
        """What the body says, or its text where it is neither JSON nor MessagePack."""
        try:
            packed = self.headers.get("content-type", "").startswith(MSGPACK)
            return (msgspec.msgpack if packed else msgspec.json).decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self.body.decode(errors="replace")


@dataclass(frozen=True)
class Lost:
    """No answer came."""

    reason: str


def client_method(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """Make a coroutine function a method of both clients. A `TrajectoryClient` returns the coroutine's result; with an
    `AsyncTrajectoryClient`, it is awaited."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(method(self, *args, **kwargs))

    return call


async def exchange(
    base: str,
    request: HttpRequest,
    deadline: float,
    attempt_timeout: float,
    send: Callable[[HttpRequest, float], Awaitable[HttpReply | Lost]],
    pause: Callable[[float], Awaitable[None]],
) -> HttpReply:
    """Send a request until there is an answer other than "not now".

    Args:
        base: URL before the request's path; messages name it.
        deadline: seconds for all attempts and the pauses between them; one attempt is made in any case, and the last
            one has at least 2 s.
        attempt_timeout: seconds for one attempt, beside the request's patience.
        send: makes an attempt, of so many seconds.
        pause: for so many seconds.

    Raises:
        UnavailableError: at the deadline the service answered that it cannot now, or it says that it will not before.
        PeerError: at the deadline it did not answer.
    """
    began, attempts = time.monotonic(), 0
    # Jitter keeps clients that lost the service together from coming back together.
    pauses = retry.pauses(_PAUSE, _LONGEST_PAUSE, deadline, since=began, jitter=0.5)
    while True:
        left = began + deadline - time.monotonic()
        attempts += 1
        answer = await send(request, min(max(left, _LEAST), attempt_timeout + request.patience))
        if isinstance(answer, HttpReply) and answer.status not in _NOT_NOW:
            return answer
        left = began + deadline - time.monotonic()
        least, grown = _retry_after(answer), next(pauses, None)
        if grown is None or least > left:
            waited = f"{time.monotonic() - began:.1f} s and {attempts} attempts (the deadline is {deadline:g} s)"
            raise _failure(f"{request.method} {base}{request.path}", waited, answer)
        await pause(min(least + grown, left))


def accepted(base: str, request: HttpRequest, reply: HttpReply) -> dict[str, Any]:
    """The content of an answer that says yes.

    Raises:
        UsageError: the service refused the request: it will not do better when sent again (TooOldError: of a group).
        UnavailableError: something has to happen first.
        RemoteError: the service failed at it.
        PeerError: that is no trajectory service's answer.
    """
    call, content = f"{request.method} {base}{request.path}", reply.content
    if reply.status >= 500:
        raise RemoteError(f"{call}: the trajectory service failed with status {reply.status}: {_told(content)}")
    if reply.status == 409:
        raise TooOldError(f"{call}: the trajectory service refused it: {_told(content)}")
    if 400 <= reply.status < 500:
        hint = " Give the client the service's token." if reply.status == 401 else ""
        raise UsageError(f"{call}: the trajectory service refused it ({reply.status}): {_told(content)}{hint}")
    if reply.status != 200 or not isinstance(content, dict):
        raise PeerError(
            f"{call}: a JSON object was expected from a trajectory service, and this came with status {reply.status}: "
            f"{_told(content)} Is the URL right?"
        )
    if content.get("status") == "failure":
        raise UsageError(f"{call}: the trajectory service refused it: {_told(content)}")
    if content.get("status") == "error":
        raise UnavailableError(f"{call}: the trajectory service cannot yet: {_told(content)}")
    return content


def convert(base: str, content: Any, reply_type: type[T]) -> T:
    """A dataclass from an answer; fields that it has not are left out. Raises `PeerError` where one is missing."""
    try:
        return msgspec.convert(content, reply_type)
    except msgspec.ValidationError as error:
        raise PeerError(f"{base} answered something else than {reply_type.__name__}: {error}.") from None


def _retry_after(answer: HttpReply | Lost) -> float:
    """Seconds that the service asks to wait for; 0 where it does not say, or names a date."""
    try:
        return max(0.0, float(answer.headers["retry-after"])) if isinstance(answer, HttpReply) else 0.0
    except (KeyError, ValueError):
        return 0.0


def _failure(call: str, waited: str, answer: HttpReply | Lost) -> PeerError | UnavailableError:
    if isinstance(answer, Lost):
        return PeerError(
            f"{call}: no answer after {waited}; at last: {answer.reason}. "
            "Does `rlframe serve trajectories` run there, and is the URL right?"
        )
    told = _told(answer.content)
    return UnavailableError(f"{call}: not accepted after {waited}; at last it answered {answer.status}: {told}")


def _told(content: Any) -> str:
    """What an answer says is wrong, as text."""
    if isinstance(content, dict):
        detail = content.get("detail")
        if isinstance(detail, list) and all(isinstance(one, dict) for one in detail):
            return "; ".join(f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}" for one in detail)[:_SHOWN]
        for name in ("error", "message", "detail"):
            if isinstance(content.get(name), str):
                return content[name][:_SHOWN]
    return str(content)[:_SHOWN]


def post_request(path: str, content: dict[str, Any], headers: dict[str, str] | None = None) -> HttpRequest:
    """A small request, as JSON."""
    return HttpRequest("POST", path, {}, {"Content-Type": JSON, **(headers or {})}, msgspec.json.encode(content))


def new_key() -> str:
    """A key for a request, or for an idempotent one, that nobody else makes."""
    return uuid.uuid4().hex
