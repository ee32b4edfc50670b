"""What the calls of a client share: whom they go to, and until when."""

from __future__ import annotations

import os
import re
import socket
import time
import urllib.parse
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from rlframe.errors import UsageError
from rlframe.trajectories.client import exchange
from rlframe.trajectories.client.exchange import Flow, Reply, Request

JSON = "application/json"
POLL, LONGEST_POLL = 0.1, 1.0  # seconds between two looks at whether to go on, doubled in between

_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Caller:
    """A client, but for its transport: see `rlframe.trajectories.Client` for the arguments."""

    def __init__(
        self,
        url: str,
        token: str | None,
        run: str | None,
        timeout: float,
        attempt_timeout: float,
        consumer: str | None,
        compress: bool,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise UsageError(f"The URL of a trajectory service is like http://HOST:PORT; got {url!r}.")
        if run is not None and not _RUN.fullmatch(run):
            raise UsageError(f"A run's name is 1 to 64 letters, digits, dots, dashes or underscores; got {run!r}.")
        for name, seconds in (("timeout", timeout), ("attempt_timeout", attempt_timeout)):
            if seconds <= 0:
                raise UsageError(f"A client's {name} is more than 0 s; got {seconds}.")
        self.base = url.rstrip("/") + (f"/runs/{run}" if run is not None else "")
        self.headers = {"Accept": JSON, "Accept-Encoding": "gzip" if compress else "identity"}
        if token is not None:
            self.headers["Authorization"] = f"Bearer {token}"
        self.consumer = consumer or f"{socket.gethostname()}-{os.getpid()}-{new_key()[:8]}"
        self.compress = compress
        self._timeout, self._attempt_timeout = timeout, attempt_timeout

    def deadline(self, timeout: float | None) -> float:
        """Seconds for a call that was given this `timeout`."""
        return self._timeout if timeout is None else timeout

    def exchange(self, request: Request, timeout: float | None) -> Flow[Reply]:
        """Sends a request until it is answered."""
        return (yield from exchange.exchange(self.base, request, self.deadline(timeout), self._attempt_timeout))

    def ask(self, request: Request, reply_type: type[Any], timeout: float | None) -> Flow[Any]:
        """As `tell`; the answer as a `reply_type`."""
        content = yield from self.tell(request, timeout)
        return exchange.convert(self.base, content, reply_type)

    def tell(self, request: Request, timeout: float | None) -> Flow[dict[str, Any]]:
        """Sends a request until it is accepted."""
        reply = yield from self.exchange(request, timeout)
        return exchange.accepted(self.base, request, reply)


def post_request(path: str, content: dict[str, Any], headers: dict[str, str] | None = None) -> Request:
    """A small request, as JSON."""
    return Request("POST", path, {}, {"Content-Type": JSON, **(headers or {})}, msgspec.json.encode(content))


def pauses(wait: float) -> Iterator[float]:
    """Seconds to pause between two looks at whether to go on, until `wait` seconds from now on are over."""
    end, pause = time.monotonic() + wait, POLL
    while (left := end - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(2 * pause, LONGEST_POLL)


def new_key() -> str:
    """A key for a request, or for an idempotent one, that nobody else makes."""
    return uuid.uuid4().hex
