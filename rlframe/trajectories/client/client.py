"""Clients of the trajectory service, for environments and trainers: one that blocks, one for asyncio."""

from __future__ import annotations

import functools
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio
import httpx

from rlframe.shutdown import Closeable
from rlframe.trajectories.client.base_client import HttpReply, HttpRequest
from rlframe.trajectories.client.calls import EnvironmentCalls, TrainerCalls

T = TypeVar("T")

_CONNECT_TIMEOUT = 5.0  # seconds
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)


class TrajectoryClient(TrainerCalls, EnvironmentCalls, Closeable):
    """A client whose calls block. Any thread may call it. Use it as a context manager, or close it.

    While the service cannot be reached, does not answer or says that it cannot now, a call is repeated, with pauses
    that grow, until its deadline. Each is safe to repeat: a group is there once, a batch is given once. What the
    service refuses is not sent again.

    Args:
        url: http://HOST:PORT.
        token: that the service was started with.
        run: namespace on the service; None: the default one.
        timeout: seconds for a call with all its repetitions, unless the call says otherwise.
        attempt_timeout: seconds after which one attempt is given up.
        consumer: whose the leased batches are; None: a name of this client's own.
        compress: send groups compressed by zstd, take answers compressed by gzip: for slow networks.

    Raises (every call):
        PeerError: no answer came by the deadline.
        UnavailableError: the service could not by the deadline: it was full, say.
        UsageError: the service refused it.
        RemoteError: the service failed at it.
        StoppedError: the client was stopped or closed meanwhile.
    """

    _transport = staticmethod(functools.partial(httpx.Client, limits=_LIMITS))

    def close(self) -> None:
        """Close the connections. Calls under way in other threads end with StoppedError. Twice does nothing more."""
        self._stopped.set()
        self._http.close()

    def _run(self, method: Coroutine[Any, Any, T]) -> T:
        try:
            method.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("What blocks never waits for an event loop.")

    async def _pause(self, seconds: float) -> None:
        self._stopped.wait(seconds)

    async def _send(self, request: HttpRequest, timeout: float) -> HttpReply | str:
        self._check()
        end = time.monotonic() + timeout
        body = bytearray()
        try:
            with self._http.stream(**_arguments(self.url, request, timeout)) as response:
                for chunk in response.iter_bytes():
                    body += chunk
                    if time.monotonic() > end:  # the transport's own timeouts are for each read
                        return f"the answer was not complete after {timeout:g} s"
                return HttpReply(response.status_code, response.headers, bytes(body))
        except httpx.HTTPError as error:
            return _reason(error)
        except RuntimeError:  # the transport was closed by another thread
            self._check()
            raise


class AsyncTrajectoryClient(TrainerCalls, EnvironmentCalls):
    """`TrajectoryClient` for asyncio: the same arguments, calls and errors, and every call is awaited.

    Tasks may share it.
    """

    _transport = staticmethod(functools.partial(httpx.AsyncClient, limits=_LIMITS))

    async def close(self) -> None:
        """Close the connections. Calls under way end with StoppedError. Twice does nothing more."""
        self._stopped.set()
        await self._http.aclose()

    async def __aenter__(self) -> AsyncTrajectoryClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _run(self, method: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return method

    async def _pause(self, seconds: float) -> None:
        await anyio.sleep(seconds)

    async def _send(self, request: HttpRequest, timeout: float) -> HttpReply | str:
        self._check()
        try:
            with anyio.fail_after(timeout):
                response = await self._http.request(**_arguments(self.url, request, timeout))
        except TimeoutError:
            return f"the answer was not complete after {timeout:g} s"
        except httpx.HTTPError as error:
            return _reason(error)
        except RuntimeError:  # the transport was closed by another task
            self._check()
            raise
        return HttpReply(response.status_code, response.headers, response.content)


def _arguments(url: str, request: HttpRequest, timeout: float) -> dict[str, Any]:
    """Of the transport's method that sends."""
    return {
        "method": request.method,
        "url": url + request.path,
        "params": request.params,
        "headers": request.headers,
        "content": request.body,
        "timeout": httpx.Timeout(timeout, connect=min(timeout, _CONNECT_TIMEOUT)),
    }


def _reason(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
