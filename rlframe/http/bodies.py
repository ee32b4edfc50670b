"""Read request bodies: limit and decompress a body before an endpoint reads it. Encode response bodies."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import msgspec
import zstandard
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MSGPACK = "application/msgpack"
BODY_DEADLINE = 60.0  # seconds in which a request's body must arrive
BODIES_BYTES = 512 << 20  # maximum total bytes of all request bodies in memory, compressed and decompressed
_PIECE = 1024  # bytes per decompression call; the output can have 32 MB (zstd) or 1 MB (gzip)
_PARTS = 10_000  # maximum number of gzip members or zstd frames in a body
_PADDING = re.compile(rb"\0*")  # zero bytes that can follow a gzip member or zstd frame
_ENCODINGS = 2  # maximum number of encodings in Content-Encoding
# If a body is too large, the server reads and drops up to 16 times the limit, so that the client sees the response.
_DROPPED = 16


def answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a small JSON response."""
    return Response(encoded(content), status, headers, "application/json")


_LINE_ENDS = "\x85\u2028\u2029"  # these are escaped, because some clients split events at Unicode line ends


def event_data(content: Any) -> bytes:
    """Encode a value as the data of a server-sent event: JSON in one line."""
    data = encoded(content)
    for character in _LINE_ENDS:
        data = data.replace(character.encode(), f"\\u{ord(character):04x}".encode())
    return data


def encoded(content: Any) -> bytes:
    """Encode a value as JSON. NaN and infinity become null. Paths that are not UTF-8 are written with escapes."""
    try:
        return msgspec.json.encode(content)
    except UnicodeEncodeError:
        plain = json.dumps(msgspec.to_builtins(content))
        return json.dumps(json.loads(plain, parse_constant=lambda _: None)).encode()


Refusal = Callable[[str, int, dict[str, str] | None], Response]  # (error, status, headers) -> response


def detail(error: str, status: int, headers: dict[str, str] | None = None) -> Response:
    """Return an error response in FastAPI's format."""
    return answer({"detail": error}, status, headers)


def retry_later(error: str, status: str = "full", seconds: int = 1) -> Response:
    """Return a 503 response that asks the client to send the same request again later."""
    return answer({"status": status, "error": error}, 503, {"Retry-After": str(seconds)})


class ReadBody:
    """ASGI middleware that reads and decompresses the body, and passes the body on as one message.

    It refuses bodies over the limits, and passes requests without a body on unchanged. It converts MessagePack to JSON,
    except for paths in `raw`, whose endpoints read MessagePack.

    Args:
        limit: Maximum bytes of a body, both compressed and decompressed.
        raw: Path suffixes of the endpoints that read MessagePack.
        deadline: Seconds in which a body must arrive.
        refusal: Creates the response to a refused request.
    """

    def __init__(
        self,
        app: ASGIApp,
        limit: int,
        raw: tuple[str, ...] = (),
        deadline: float = BODY_DEADLINE,
        refusal: Refusal = detail,
    ) -> None:
        self._app = app
        self._refusal = refusal
        self._deadline = deadline
        self._limit = limit
        self._raw = raw
        self._reading = 0  # total bytes of all bodies in memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        if "content-length" not in headers and "transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        taken = [0]
        try:
            body = await self._read(headers, receive, taken)
            if "content-encoding" in headers:
                body = await self._decoded(headers["content-encoding"], body)
                self._count(taken, len(body))
                del headers["content-encoding"]
            if headers.get("content-type", "").startswith(MSGPACK) and not scope["path"].endswith(self._raw):
                body = _as_json(body)
                headers["content-type"] = "application/json"
            headers["content-length"] = str(len(body))
            await self._app(scope, _replay_body(body, receive), send)
        except HTTPException as refused:
            response = self._refusal(refused.detail, refused.status_code, dict(refused.headers or {}))
            await response(scope, receive, send)
        finally:
            self._reading -= taken[0]

    async def _read(self, headers: Headers, receive: Receive, taken: list[int]) -> bytes:
        """Read the body without decompression. Add its bytes to `taken[0]`, the request's part of `_reading`."""
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._limit:
            raise self._too_large(length=int(length))
        parts: list[bytes] = []
        sent, more = 0, True
        with anyio.move_on_after(self._deadline):
            while more and sent <= _DROPPED * self._limit:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise HTTPException(400, "The client disconnected.")
                part, more = message.get("body", b""), message.get("more_body", False)
                sent += len(part)
                if sent <= self._limit:
                    self._count(taken, len(part))
                    parts.append(part)
                elif parts:  # free the memory, but read on, so that the client sees the response
                    self._count(taken, -taken[0])
                    parts.clear()
        if sent > self._limit:
            raise self._too_large(ended=not more)
        if more:
            error = f"The body did not arrive within {self._deadline:.0f} s."
            raise HTTPException(408, error, {"Connection": "close"})
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _count(self, taken: list[int], size: int) -> None:
        taken[0] += size
        self._reading += size
        if self._reading > BODIES_BYTES:
            raise HTTPException(503, "The request bodies in memory exceed the limit.", {"Retry-After": "1"})

    async def _decoded(self, encoding: str, body: bytes) -> bytes:
        names = [name.strip().lower() for name in encoding.split(",")]
        names = [name for name in names if name not in ("", "identity")]
        if len(names) > _ENCODINGS:
            raise HTTPException(
                415, f"A body may have at most {_ENCODINGS} encodings; Content-Encoding has {len(names)}."
            )
        for name in reversed(names):
            if name not in _DECOMPRESSORS:
                raise HTTPException(415, f"Content-Encoding {name!r} is not supported. Use gzip or zstd.")
            if not body:
                continue
            decode = functools.partial(decompressed, _DECOMPRESSORS[name], body, self._limit)
            try:  # use a thread, because a small body can become a large body
                body = await asyncio.get_running_loop().run_in_executor(None, decode)
            except (zlib.error, zstandard.ZstdError, ValueError) as error:
                raise HTTPException(400, f"Invalid {name} payload: {error}.") from None
            if len(body) > self._limit:
                raise self._too_large()
        return body

    def _too_large(self, length: int = 0, ended: bool = True) -> HTTPException:
        error = f"A body may have at most {self._limit >> 20} MB, also decompressed. --max-body-mb sets this limit."
        # Keep the connection if the server can read and drop the rest of the body. Otherwise close the connection.
        ended = ended and length <= _DROPPED * self._limit
        return HTTPException(413, error, None if ended else {"Connection": "close"})


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` function that returns the body first, and then the server's next messages."""
    first: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive_body_first() -> Message:
        return next(first, None) or await receive()

    return receive_body_first


def _as_json(body: bytes) -> bytes:
    try:
        return msgspec.json.encode(msgspec.msgpack.decode(body))
    except (ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise HTTPException(400, f"The body is not valid MessagePack: {error}.") from None


def decompressed(start: Callable[[], Any], body: bytes, limit: int) -> bytes:
    """Decompress a body. Stop if the result exceeds `limit`. It exceeds `limit` by 32 MB at most.

    Args:
        start: Creates a decompressor for one part, which is a gzip member or a zstd frame.

    Raises:
        ValueError: The body ends too early, or has more than `_PARTS` parts. The number of parts is limited because an
            empty part has only 20 bytes, but takes the time of a part with a kilobyte.
    """
    out, at = bytearray(), 0
    for _ in range(_PARTS):
        one = start()
        while not one.eof and len(out) <= limit:
            if at >= len(body):
                raise ValueError("the data ends too early")
            out += one.decompress(body[at : at + _PIECE])
            at += _PIECE
        at = _PADDING.match(body, min(at, len(body)) - len(one.unused_data)).end()  # type: ignore[union-attr]
        if at >= len(body) or len(out) > limit:
            return bytes(out)
    raise ValueError(f"the data has more than {_PARTS} parts")


# Name in Content-Encoding -> function that creates a decompressor.
_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("gzip", "x-gzip"), lambda: zlib.decompressobj(wbits=31)),
    "zstd": lambda: zstandard.ZstdDecompressor(max_window_size=1 << 23).decompressobj(),
}
