"""The base class of `TrajectoryClient` and `AsyncTrajectoryClient`: requests with retries.

The two clients run the same coroutines. In the blocking client, every awaited operation blocks. So a coroutine runs to
its end without an event loop.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import threading
import time
import urllib.parse
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from rlframe import retry
from rlframe.errors import PeerError, RemoteError, StaleGroupError, StoppedError, UnavailableError, UsageError

JSON = "application/json"
MSGPACK = "application/msgpack"
LONGEST_POLL = 1.0  # longest pause between two polls, in seconds

_POLL = 0.1  # seconds before the second poll; the pauses double up to `LONGEST_POLL`
_RETRIED_STATUSES = (502, 503, 504)
_PAUSE, _LONGEST_PAUSE = 0.05, 5.0  # seconds: the first and the longest pause of the exponential backoff
_MIN_ATTEMPT = 2.0  # minimum seconds for one attempt, even if it ends after the deadline: a busy service answers late
_MAX_SHOWN = 500  # maximum number of characters that an error message quotes from an unexpected answer
_RUN_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

T = TypeVar("T")


@dataclass(frozen=True)
class HttpRequest:
    """A request that can be repeated safely. Some requests have an idempotency key, to make a repetition safe."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    server_wait: float = 0.0  # maximum seconds that the service waits before it answers


@dataclass(frozen=True)
class HttpReply:
    status: int
    headers: Mapping[str, str]  # lower case
    body: bytes

    @property
    def content(self) -> Any:
        """The decoded body if its format is JSON or MessagePack. Otherwise the body as text."""
        try:
            packed = self.headers.get("content-type", "").startswith(MSGPACK)
            return (msgspec.msgpack if packed else msgspec.json).decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self.body.decode(errors="replace")


def client_method(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """Turn a coroutine function into a method of both clients.

    The method of a `TrajectoryClient` returns the result. The method of an `AsyncTrajectoryClient` returns a coroutine.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(method(self, *args, **kwargs))

    return call


class BaseClient:
    """The shared part of `TrajectoryClient`, which describes the arguments, and `AsyncTrajectoryClient`.

    Attributes:
        url: Address of the run at the service.
        consumer: Name of this client as the owner of leased batches.
    """

    _transport: Callable[..., Any]
    # Make one attempt with a timeout in seconds. Return the reply, or the reason for the failure.
    _send: Callable[[HttpRequest, float], Awaitable[HttpReply | str]]
    _pause: Callable[[float], Awaitable[None]]  # sleep for this many seconds

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        run: str | None = None,
        timeout: float = 60.0,
        attempt_timeout: float = 30.0,
        consumer: str | None = None,
        compress: bool = False,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise UsageError(f"The URL of a trajectory service must look like http://HOST:PORT; got {url!r}.")
        if run is not None and not _RUN_NAME.fullmatch(run):
            raise UsageError(f"A run's name must be 1 to 64 letters, digits, dots, dashes or underscores; got {run!r}.")
        for name, seconds in (("timeout", timeout), ("attempt_timeout", attempt_timeout)):
            if seconds <= 0:
                raise UsageError(f"A client's {name} must be more than 0 s; got {seconds}.")
        self.url = url.rstrip("/") + (f"/runs/{run}" if run is not None else "")
        self.consumer = consumer or f"{socket.gethostname()}-{os.getpid()}-{new_key()[:8]}"
        headers = {"Accept": JSON, "Accept-Encoding": "gzip" if compress else "identity"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._compress = compress
        self._timeout, self._attempt_timeout = timeout, attempt_timeout
        self._stopped = threading.Event()
        self._http = self._transport(headers=headers)

    def stop(self) -> None:
        """Send no more requests. Unfinished calls return the answer to their last attempt, or raise StoppedError."""
        self._stopped.set()

    def _check(self) -> None:
        if self._stopped.is_set():
            raise StoppedError(f"The client of {self.url} was stopped or closed.")

    async def _send_with_retries(self, request: HttpRequest, timeout: float | None) -> HttpReply:
        """Send a request, and retry while the service is unreachable or unavailable. Return the answer.

        Args:
            timeout: Seconds for all attempts and pauses, in addition to the request's `server_wait`. None means the
                client's timeout. The last attempt always gets at least 2 s, even if it then ends after this time.

        Raises:
            UnavailableError: The service was still unavailable at the deadline, or requested a longer pause.
            PeerError: The service did not answer by the deadline.
        """
        deadline = (self._timeout if timeout is None else timeout) + request.server_wait
        began, attempts = time.monotonic(), 0
        # With jitter, clients that lost the service at the same time do not retry at the same time.
        pauses = retry.backoff(_PAUSE, _LONGEST_PAUSE, deadline, since=began, jitter=0.5)
        while True:
            left = began + deadline - time.monotonic()
            attempts += 1
            answer = await self._send(
                request, min(max(left, _MIN_ATTEMPT), self._attempt_timeout + request.server_wait)
            )
            if isinstance(answer, HttpReply) and answer.status not in _RETRIED_STATUSES:
                return answer
            left = began + deadline - time.monotonic()
            least, grown = _retry_after(answer), next(pauses, None)
            if grown is None or least > left:
                waited = f"{time.monotonic() - began:.1f} s and {attempts} attempts (the deadline is {deadline:g} s)"
                raise _failure(f"{request.method} {self.url}{request.path}", waited, answer)
            await self._pause(min(least + grown, left))

    def _accepted_content(self, request: HttpRequest, reply: HttpReply) -> dict[str, Any]:
        """Return the content of an answer, or raise an error if the service did not accept the request.

        Raises:
            UsageError: The service refused the request, and a retry cannot help.
            StaleGroupError: Some groups in the request are too old.
            UnavailableError: The service is not ready. For example, no trainer is registered.
            RemoteError: The service failed.
            PeerError: The answer does not come from a trajectory service.
        """
        call, content = f"{request.method} {self.url}{request.path}", reply.content
        if reply.status >= 500:
            raise RemoteError(
                f"{call}: the trajectory service failed with status {reply.status}: {_error_text(content)}"
            )
        if reply.status == 409:
            raise StaleGroupError(f"{call}: the trajectory service refused it: {_error_text(content)}")
        if 400 <= reply.status < 500:
            hint = " Give the client the service's token." if reply.status == 401 else ""
            raise UsageError(
                f"{call}: the trajectory service refused it ({reply.status}): {_error_text(content)}{hint}"
            )
        if reply.status != 200 or not isinstance(content, dict):
            raise PeerError(
                f"{call}: expected a JSON object from a trajectory service, but got an answer with status "
                f"{reply.status}: {_error_text(content)} Is the URL right?"
            )
        if content.get("status") == "failure":
            raise UsageError(f"{call}: the trajectory service refused it: {_error_text(content)}")
        if content.get("status") == "error":
            raise UnavailableError(f"{call}: the trajectory service is not ready: {_error_text(content)}")
        return content

    async def _send_accepted(self, request: HttpRequest, timeout: float | None) -> dict[str, Any]:
        """Send a request with retries. Return the answer's content, or raise an error (see `_accepted_content`)."""
        return self._accepted_content(request, await self._send_with_retries(request, timeout))

    async def _send_as(self, request: HttpRequest, reply_type: type[Any], timeout: float | None) -> Any:
        """Call `_send_accepted`, and convert the content to a `reply_type`."""
        return self._convert(await self._send_accepted(request, timeout), reply_type)

    def _convert(self, content: Any, reply_type: type[T]) -> T:
        """Convert an answer to a dataclass. Ignore fields of the answer that the dataclass does not have."""
        try:
            return msgspec.convert(content, reply_type)
        except msgspec.ValidationError as error:
            raise PeerError(f"{self.url}: the answer is not a valid {reply_type.__name__}: {error}.") from None

    async def _poll(self, ask: Callable[[], Awaitable[T]], enough: Callable[[T], bool], wait: float) -> T:
        """Call `ask` until `enough(answer)` is true or `wait` seconds have passed. Return the last answer."""
        pauses = retry.backoff(_POLL, LONGEST_POLL, wait)
        while not enough(answer := await ask()) and (pause := next(pauses, None)) is not None:
            await self._pause(pause)
        return answer


def _retry_after(answer: HttpReply | str) -> float:
    """Return the pause in seconds that the answer requests. Return 0 if there is none, or if it is a date."""
    try:
        return max(0.0, float(answer.headers["retry-after"])) if isinstance(answer, HttpReply) else 0.0
    except (KeyError, ValueError):
        return 0.0


def _failure(call: str, waited: str, answer: HttpReply | str) -> PeerError | UnavailableError:
    if isinstance(answer, str):
        return PeerError(
            f"{call}: no answer after {waited}. Last error: {answer}. "
            "Does `rlframe serve trajectories` run there, and is the URL right?"
        )
    error_text = _error_text(answer.content)
    return UnavailableError(f"{call}: not accepted after {waited}. The last answer was {answer.status}: {error_text}")


def _error_text(content: Any) -> str:
    """Return the error message from the content of an answer."""
    if isinstance(content, dict):
        detail = content.get("detail")
        if isinstance(detail, list) and all(isinstance(one, dict) for one in detail):
            return "; ".join(f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}" for one in detail)[
                :_MAX_SHOWN
            ]
        for name in ("error", "message", "detail"):
            if isinstance(content.get(name), str):
                return content[name][:_MAX_SHOWN]
    return str(content)[:_MAX_SHOWN]


def post_request(path: str, content: dict[str, Any], headers: dict[str, str] | None = None) -> HttpRequest:
    """Make a small request with a JSON body."""
    return HttpRequest("POST", path, {}, {"Content-Type": JSON, **(headers or {})}, msgspec.json.encode(content))


def new_key() -> str:
    """Return a new unique key for a request."""
    return uuid.uuid4().hex
