"""Clients of the trajectory service, for environments and trainers: one that blocks, one for asyncio."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import anyio
import httpx

from rlframe.errors import StoppedError
from rlframe.trajectories.client.env_calls import EnvCalls
from rlframe.trajectories.client.exchange import Attempt, Flow, Lost, Reply
from rlframe.trajectories.client.trainer_calls import TrainerCalls

P = ParamSpec("P")
T = TypeVar("T")

_CONNECT_TIMEOUT = 5.0  # seconds
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)


class Calls(TrainerCalls, EnvCalls):
    """All calls."""


class _BaseClient:
    """What the clients share but for the transport."""

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
        self._calls = Calls(url, token, run, timeout, attempt_timeout, consumer, compress)
        self._stopped = threading.Event()
        self._open()

    def _open(self) -> None:
        """Makes the transport."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        """Of the service and the run."""
        return self._calls.base

    @property
    def consumer(self) -> str:
        """Whose the leased batches are."""
        return self._calls.consumer

    def stop(self) -> None:
        """Nothing is sent from now on: a call ends with the answer to what was sent, or StoppedError."""
        self._stopped.set()

    def _check(self) -> None:
        if self._stopped.is_set():
            raise StoppedError(f"The client of {self.url} was stopped or closed.")

    def _arguments(self, attempt: Attempt) -> dict[str, Any]:
        """Of the transport's method that sends."""
        request, connect = attempt.request, min(attempt.timeout, _CONNECT_TIMEOUT)
        return {
            "method": request.method,
            "url": self.url + request.path,
            "params": request.params,
            "headers": request.headers,
            "content": request.body,
            "timeout": httpx.Timeout(attempt.timeout, connect=connect),
        }


def _blocking(flow: Callable[Concatenate[Calls, P], Flow[T]]) -> Callable[Concatenate[Client, P], T]:
    @functools.wraps(flow)
    def call(self: Client, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(flow(self._calls, *args, **kwargs))

    return call


def _awaitable(flow: Callable[Concatenate[Calls, P], Flow[T]]) -> Callable[Concatenate[AsyncClient, P], Awaitable[T]]:
    @functools.wraps(flow)
    async def call(self: AsyncClient, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(flow(self._calls, *args, **kwargs))

    return call


class Client(_BaseClient):
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

    def _open(self) -> None:
        self._http = httpx.Client(headers=self._calls.headers, limits=_LIMITS)

    register = _blocking(Calls.register)
    info = _blocking(Calls.info)
    wandb_info = _blocking(Calls.wandb_info)
    status = _blocking(Calls.status)
    batch = _blocking(Calls.batch)
    ack = _blocking(Calls.ack)
    nack = _blocking(Calls.nack)
    renew = _blocking(Calls.renew)
    set_policy_version = _blocking(Calls.set_policy_version)
    pause = _blocking(Calls.pause)
    resume = _blocking(Calls.resume)
    register_env = _blocking(Calls.register_env)
    disconnect_env = _blocking(Calls.disconnect_env)
    heartbeat = _blocking(Calls.heartbeat)
    env_status = _blocking(Calls.env_status)
    post = _blocking(Calls.post)
    wait_until_wanted = _blocking(Calls.wait_until_wanted)

    def close(self) -> None:
        """Closes the connections. Calls under way in other threads end with StoppedError. Twice does nothing more."""
        self._stopped.set()
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, flow: Flow[T]) -> T:
        answer: Reply | Lost | None = None
        while True:
            try:
                step = flow.send(answer)
            except StopIteration as done:
                return done.value
            answer = None
            if isinstance(step, Attempt):
                self._check()
                answer = self._attempt(step)
            else:
                self._stopped.wait(step)

    def _attempt(self, attempt: Attempt) -> Reply | Lost:
        end = time.monotonic() + attempt.timeout
        body = bytearray()
        try:
            with self._http.stream(**self._arguments(attempt)) as response:
                for chunk in response.iter_bytes():
                    body += chunk
                    if time.monotonic() > end:  # the transport's own timeouts are for each read
                        return Lost(f"the answer was not complete after {attempt.timeout:g} s")
                return Reply(response.status_code, response.headers, bytes(body))
        except httpx.HTTPError as error:
            return Lost(_reason(error))
        except RuntimeError:  # the transport was closed by another thread
            self._check()
            raise


class AsyncClient(_BaseClient):
    """`Client` for asyncio: the same arguments, calls and errors, and every call is awaited. Tasks may share it."""

    def _open(self) -> None:
        self._http = httpx.AsyncClient(headers=self._calls.headers, limits=_LIMITS)

    register = _awaitable(Calls.register)
    info = _awaitable(Calls.info)
    wandb_info = _awaitable(Calls.wandb_info)
    status = _awaitable(Calls.status)
    batch = _awaitable(Calls.batch)
    ack = _awaitable(Calls.ack)
    nack = _awaitable(Calls.nack)
    renew = _awaitable(Calls.renew)
    set_policy_version = _awaitable(Calls.set_policy_version)
    pause = _awaitable(Calls.pause)
    resume = _awaitable(Calls.resume)
    register_env = _awaitable(Calls.register_env)
    disconnect_env = _awaitable(Calls.disconnect_env)
    heartbeat = _awaitable(Calls.heartbeat)
    env_status = _awaitable(Calls.env_status)
    post = _awaitable(Calls.post)
    wait_until_wanted = _awaitable(Calls.wait_until_wanted)

    async def close(self) -> None:
        """Closes the connections. Calls under way end with StoppedError. Twice does nothing more."""
        self._stopped.set()
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _run(self, flow: Flow[T]) -> T:
        answer: Reply | Lost | None = None
        while True:
            try:
                step = flow.send(answer)
            except StopIteration as done:
                return done.value
            answer = None
            if isinstance(step, Attempt):
                self._check()
                answer = await self._attempt(step)
            else:
                await anyio.sleep(step)

    async def _attempt(self, attempt: Attempt) -> Reply | Lost:
        try:
            with anyio.fail_after(attempt.timeout):
                response = await self._http.request(**self._arguments(attempt))
        except TimeoutError:
            return Lost(f"the answer was not complete after {attempt.timeout:g} s")
        except httpx.HTTPError as error:
            return Lost(_reason(error))
        except RuntimeError:  # the transport was closed by another task
            self._check()
            raise
        return Reply(response.status_code, response.headers, response.content)


def _reason(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
