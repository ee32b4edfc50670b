"""Clients of the trajectory service, for environments and trainers: a blocking client and an asyncio client."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import anyio
import httpx

from rlframe.shutdown import Closeable
from rlframe.trajectories.client.base_client import HttpReply, HttpRequest
from rlframe.trajectories.client.calls import EnvironmentCalls, TrainerCalls

T = TypeVar("T")

_CONNECT_TIMEOUT = 5.0  # seconds
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)


class _HttpxCalls(TrainerCalls, EnvironmentCalls):
    """All calls, sent with httpx."""

    # Send a request with these arguments of httpx. Raise TimeoutError if the answer takes longer than `seconds`.
    _request: Callable[..., Awaitable[HttpReply]]

    async def _send(self, request: HttpRequest, timeout: float) -> HttpReply | str:
        self._check()
        try:
            return await self._request(
                timeout,
                method=request.method,
                url=self.url + request.path,
                params=request.params,
                headers=request.headers,
                content=request.body,
                timeout=httpx.Timeout(timeout, connect=min(timeout, _CONNECT_TIMEOUT)),
            )
        except TimeoutError:
            return f"the answer was not complete after {timeout:g} s"
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        except RuntimeError:  # the transport was closed by another thread or task
            self._check()
            raise


class TrajectoryClient(_HttpxCalls, Closeable):
    """A blocking client. Any thread may call it. Use it as a context manager, or close it.

    If the service is unreachable or unavailable, calls are retried with growing pauses (backoff) until their deadline.
    All calls are idempotent: a retry does not add a group twice or take a second batch. If the service refuses a
    request, the request is not retried.

    Args:
        url: Address of the service, http://HOST:PORT.
        token: The service's access token.
        run: Name of the run. None means the default run.
        timeout: Seconds for a call with all its retries. Each call can override it.
        attempt_timeout: Seconds for one attempt.
        consumer: Name of the owner of the leased batches. None means a name that is unique to this client.
        compress: Send groups compressed with zstd, and accept answers compressed with gzip, for slow networks.

    Raises (every call):
        PeerError: The service did not answer by the deadline.
        UnavailableError: The service was unavailable until the deadline, for example because it was full.
        UsageError: The service refused the request.
        RemoteError: The service failed.
        StoppedError: The client was stopped or closed during the call.
    """

    _transport = staticmethod(functools.partial(httpx.Client, limits=_LIMITS, trust_env=False))

    def close(self) -> None:
        """Close the connections. Calls in other threads raise StoppedError. A second call does nothing."""
        self._stopped.set()
        self._http.close()

    def _run(self, method: Coroutine[Any, Any, T]) -> T:
        try:
            method.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("A blocking client never waits for an event loop.")

    async def _pause(self, seconds: float) -> None:
        self._stopped.wait(seconds)

    async def _request(self, seconds: float, **arguments: Any) -> HttpReply:
        end = time.monotonic() + seconds
        body = bytearray()
        with self._http.stream(**arguments) as response:
            for chunk in response.iter_bytes():
                body += chunk
                if time.monotonic() > end:  # httpx has no timeout for the whole answer, only for each read
                    raise TimeoutError
            return HttpReply(response.status_code, response.headers, bytes(body))


class AsyncTrajectoryClient(_HttpxCalls, contextlib.AbstractAsyncContextManager["AsyncTrajectoryClient"]):
    """A `TrajectoryClient` for asyncio, with the same arguments, calls and errors. Every call is awaited.

    Several tasks may share a client.
    """

    _transport = staticmethod(functools.partial(httpx.AsyncClient, limits=_LIMITS, trust_env=False))

    async def close(self) -> None:
        """Close the connections. Unfinished calls raise StoppedError. A second call does nothing."""
        self._stopped.set()
        await self._http.aclose()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _run(self, method: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return method

    async def _pause(self, seconds: float) -> None:
        await anyio.sleep(seconds)

    async def _request(self, seconds: float, **arguments: Any) -> HttpReply:
        with anyio.fail_after(seconds):
            response = await self._http.request(**arguments)
            return HttpReply(response.status_code, response.headers, response.content)
