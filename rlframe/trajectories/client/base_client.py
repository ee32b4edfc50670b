"""One request until it is answered: what is sent again, when, and what comes of it.

Both clients run the same coroutines. In a client that blocks, what they await is done when it returns: they end at
their first step, and nothing waits for an event loop.
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
LONGEST_POLL = 1.0  # seconds between two looks at whether to go on

_POLL = 0.1  # seconds before the second look, doubled up to `LONGEST_POLL`
_NOT_NOW = (502, 503, 504)
_PAUSE, _LONGEST_PAUSE = 0.05, 5.0  # seconds before the first repetition and before a late one, doubled in between
_LEAST = 2.0  # seconds for an attempt, past the deadline where less is left: a busy service takes as long to say no
_SHOWN = 500  # characters of an answer that nobody expected
_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}")

T = TypeVar("T")


@dataclass(frozen=True)
class HttpRequest:
    """What may be sent any number of times: each request of a client is idempotent, some by a key."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    server_wait: float = 0.0  # seconds that the service is asked to take


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


def client_method(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """Make a coroutine function a method of both clients. A `TrajectoryClient` returns the coroutine's result; with an
    `AsyncTrajectoryClient`, it is awaited."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(method(self, *args, **kwargs))

    return call


class BaseClient:
    """All that calls of a client have in common: see `TrajectoryClient` for the arguments.

    Attributes:
        url: of the service and the run.
        consumer: whose the leased batches are.
    """

    _transport: Callable[..., Any]
    # One attempt of at most so many seconds. Returns the reason if it failed.
    _send: Callable[[HttpRequest, float], Awaitable[HttpReply | str]]
    _pause: Callable[[float], Awaitable[None]]  # for so many seconds

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
            raise UsageError(f"The URL of a trajectory service is like http://HOST:PORT; got {url!r}.")
        if run is not None and not _RUN.fullmatch(run):
            raise UsageError(f"A run's name is 1 to 64 letters, digits, dots, dashes or underscores; got {run!r}.")
        for name, seconds in (("timeout", timeout), ("attempt_timeout", attempt_timeout)):
            if seconds <= 0:
                raise UsageError(f"A client's {name} is more than 0 s; got {seconds}.")
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
        """Nothing is sent from now on: a call ends with the answer to what was sent, or StoppedError."""
        self._stopped.set()

    def _check(self) -> None:
        if self._stopped.is_set():
            raise StoppedError(f"The client of {self.url} was stopped or closed.")

    async def _send_with_retries(self, request: HttpRequest, timeout: float | None) -> HttpReply:
        """Send a request until there is an answer other than "not now".

        Args:
            timeout: seconds for all attempts and the pauses between them, beside the request's patience; None: the
                client's. One attempt is made in any case, and the last one has at least 2 s.

        Raises:
            UnavailableError: at the deadline the service answered that it cannot now, or will not before.
            PeerError: at the deadline it did not answer.
        """
        deadline = (self._timeout if timeout is None else timeout) + request.server_wait
        began, attempts = time.monotonic(), 0
        # Jitter keeps clients that lost the service together from coming back together.
        pauses = retry.backoff(_PAUSE, _LONGEST_PAUSE, deadline, since=began, jitter=0.5)
        while True:
            left = began + deadline - time.monotonic()
            attempts += 1
            answer = await self._send(request, min(max(left, _LEAST), self._attempt_timeout + request.server_wait))
            if isinstance(answer, HttpReply) and answer.status not in _NOT_NOW:
                return answer
            left = began + deadline - time.monotonic()
            least, grown = _retry_after(answer), next(pauses, None)
            if grown is None or least > left:
                waited = f"{time.monotonic() - began:.1f} s and {attempts} attempts (the deadline is {deadline:g} s)"
                raise _failure(f"{request.method} {self.url}{request.path}", waited, answer)
            await self._pause(min(least + grown, left))

    def _accepted_content(self, request: HttpRequest, reply: HttpReply) -> dict[str, Any]:
        """Return the content of an answer that says yes.

        Raises:
            UsageError: the service refused the request, and would again (StaleGroupError: of a group).
            UnavailableError: something has to happen first.
            RemoteError: the service failed at it.
            PeerError: that is no trajectory service's answer.
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
                f"{call}: a JSON object was expected from a trajectory service, and this came with status "
                f"{reply.status}: {_error_text(content)} Is the URL right?"
            )
        if content.get("status") == "failure":
            raise UsageError(f"{call}: the trajectory service refused it: {_error_text(content)}")
        if content.get("status") == "error":
            raise UnavailableError(f"{call}: the trajectory service cannot yet: {_error_text(content)}")
        return content

    async def _send_accepted(self, request: HttpRequest, timeout: float | None) -> dict[str, Any]:
        """Send a request until it is accepted."""
        return self._accepted_content(request, await self._send_with_retries(request, timeout))

    async def _send_as(self, request: HttpRequest, reply_type: type[Any], timeout: float | None) -> Any:
        """As `_send_accepted`; the answer as a `reply_type`."""
        return self._convert(await self._send_accepted(request, timeout), reply_type)

    def _convert(self, content: Any, reply_type: type[T]) -> T:
        """Make a dataclass of an answer; fields that it has not are left out."""
        try:
            return msgspec.convert(content, reply_type)
        except msgspec.ValidationError as error:
            raise PeerError(f"{self.url} answered something else than {reply_type.__name__}: {error}.") from None

    async def _poll(self, ask: Callable[[], Awaitable[T]], enough: Callable[[T], bool], wait: float) -> T:
        """Ask until the answer is enough, or for `wait` seconds. Return the last answer."""
        pauses = retry.backoff(_POLL, LONGEST_POLL, wait)
        while not enough(answer := await ask()) and (pause := next(pauses, None)) is not None:
            await self._pause(pause)
        return answer


def _retry_after(answer: HttpReply | str) -> float:
    """Seconds that the service asks to wait for; 0 where it does not say, or names a date."""
    try:
        return max(0.0, float(answer.headers["retry-after"])) if isinstance(answer, HttpReply) else 0.0
    except (KeyError, ValueError):
        return 0.0


def _failure(call: str, waited: str, answer: HttpReply | str) -> PeerError | UnavailableError:
    if isinstance(answer, str):
        return PeerError(
            f"{call}: no answer after {waited}; at last: {answer}. "
            "Does `rlframe serve trajectories` run there, and is the URL right?"
        )
    told = _error_text(answer.content)
    return UnavailableError(f"{call}: not accepted after {waited}; at last it answered {answer.status}: {told}")


def _error_text(content: Any) -> str:
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
