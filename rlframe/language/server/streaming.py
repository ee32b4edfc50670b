"""Answers while the client is there: it is let go, and its request cancelled, once it leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rlframe.errors import UnavailableError
from rlframe.language.server.errors import RefusedError

T = TypeVar("T")


class ClientLeftError(Exception):
    """Nobody waits for the answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives. Raises `ClientLeftError` where the client leaves before; the work is cancelled then.

    Args:
        receive: ASGI's, once the whole body was received.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await working  # it frees its slots


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, each a JSON object; at the end `[DONE]`. An error is an event too."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientLeftError):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events) as events:  # type: ignore[type-var]
            try:
                async for event in events:
                    await self._say(send, msgspec.json.encode(event))
            except RefusedError as error:
                await self._say(send, msgspec.json.encode(error.content))
            except UnavailableError as error:
                await self._say(send, msgspec.json.encode(RefusedError(str(error), 503).content))
        await self._say(send, b"[DONE]", more=False)

    async def _say(self, send: Send, data: bytes, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": more})
