"""Clients of the trajectory service, for environments and trainers: one that blocks, one for asyncio."""

from __future__ import annotations

import functools
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio
import httpx

from rlframe import retry
from rlframe.errors import UnavailableError, UsageError
from rlframe.trajectories.client.calls import BaseClient
from rlframe.trajectories.client.exchange import LONGEST_POLL, POLL, HttpReply, HttpRequest, Lost, client_method
from rlframe.trajectories.messages import EnvStatus, RunStatus


class WaitingClient(BaseClient):
    """All of a client but how it sends: see `TrajectoryClient`."""

    @client_method
    async def wait_for_step(self, step: int, *, wait: float = 600.0, timeout: float | None = None) -> RunStatus:
        """Return once `current_step` is `step` or more: the trainer has pulled batch number `step`.

        `current_step` counts batches from `starting_step` on. In a trainer of several ranks, rank 0 pulls; the others
        wait for the next step, and take part in its broadcast then.

        Args:
            wait: seconds to wait for it.

        Raises:
            UsageError: the run started afresh meanwhile, so the step may never come.
            UnavailableError: the step did not come within `wait` seconds (or as every call).
        """
        looks, last = retry.pauses(POLL, LONGEST_POLL, wait), 0
        while True:
            status = await self._ask(HttpRequest("GET", "/status"), RunStatus, timeout)
            at = status.current_step
            if at >= step:
                return status
            if at < last:
                raise UsageError(
                    f"{self.url}: the run started afresh while step {step} was waited for: it was at step {last}, and "
                    f"is at step {at}. A registration with other settings does that, and so does /reset_data."
                )
            pause, last = next(looks, None), at
            if pause is None:
                raise UnavailableError(
                    f"{self.url}: step {step} did not come within {wait:g} s; the run is at step {at}, with "
                    f"{status.queue_size} groups in the queue. Does rank 0 pull batches?"
                )
            await self._pause(pause)

    @client_method
    async def wait_until_wanted(
        self, env_id: int, max_queued: int, *, wait: float = 600.0, timeout: float | None = None
    ) -> EnvStatus:
        """Return once the environment should start a new group: at most `max_queued` wait, and it is not to hold.

        Asking is a sign of life, too. `max_queued` is in groups of this environment: so many batches as the policy may
        run ahead of, times batch_size / group_size.

        Raises:
            UnavailableError: it still has to hold after `wait` seconds (or as every call).
        """
        looks = retry.pauses(POLL, LONGEST_POLL, wait)
        while True:
            status = await self._ask(HttpRequest("GET", "/status-env", {"env_id": env_id}), EnvStatus, timeout)
            if status.queue_size <= max_queued and not status.hold:
                return status
            pause = next(looks, None)
            if pause is None:
                raise UnavailableError(
                    f"{self.url}: environment {env_id} still has to hold after {wait:g} s: {status.queue_size} groups "
                    f"wait, of which it may leave {max_queued}, and hold is {status.hold}. Does the trainer run?"
                )
            await self._pause(pause)


T = TypeVar("T")

_CONNECT_TIMEOUT = 5.0  # seconds
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)


class TrajectoryClient(WaitingClient):
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

    def __enter__(self) -> TrajectoryClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, method: Coroutine[Any, Any, T]) -> T:
        try:
            method.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("What blocks never waits for an event loop.")

    async def _pause(self, seconds: float) -> None:
        self._stopped.wait(seconds)

    async def _send(self, request: HttpRequest, timeout: float) -> HttpReply | Lost:
        self._check()
        end = time.monotonic() + timeout
        body = bytearray()
        try:
            with self._http.stream(**_arguments(self.url, request, timeout)) as response:
                for chunk in response.iter_bytes():
                    body += chunk
                    if time.monotonic() > end:  # the transport's own timeouts are for each read
                        return Lost(f"the answer was not complete after {timeout:g} s")
                return HttpReply(response.status_code, response.headers, bytes(body))
        except httpx.HTTPError as error:
            return Lost(_reason(error))
        except RuntimeError:  # the transport was closed by another thread
            self._check()
            raise


class AsyncTrajectoryClient(WaitingClient):
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

    async def _send(self, request: HttpRequest, timeout: float) -> HttpReply | Lost:
        self._check()
        try:
            with anyio.fail_after(timeout):
                response = await self._http.request(**_arguments(self.url, request, timeout))
        except TimeoutError:
            return Lost(f"the answer was not complete after {timeout:g} s")
        except httpx.HTTPError as error:
            return Lost(_reason(error))
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
