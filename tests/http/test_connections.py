"""Test clients that send slowly, send too much or do not read the response, and the limit on connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import httpx
import pytest
import uvicorn

from rlframe.http.bodies import ReadBody
from rlframe.http.serving import bounded
from tests.waiting import wait_until

DEADLINE = 60.0


LARGE = 64 << 20  # bytes, which is more than the operating system buffers


PARTS = {"/large": [LARGE], "/parts": [LARGE // 4, LARGE]}  # path -> bytes of each part of the response


async def _answer(scope, receive, send):
    parts = [bytes(size) for size in PARTS.get(scope["path"], [])] or [b"ok"]
    headers = [(b"content-length", str(sum(map(len, parts))).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@contextlib.contextmanager
def served(**bounds):
    """Serve the application `_answer`. The arguments are limits for `bounded`. Yield the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(_answer, http=bounded(**bounds), lifespan="off", log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(DEADLINE)


def read_to_end(connection):
    text = b""
    while more := connection.recv(65536):
        text += more
    return text


def connect(port):
    return socket.create_connection(("127.0.0.1", port), DEADLINE)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost:"])
def test_client_that_does_not_finish_its_headers_is_disconnected(sent):
    with (
        served(limit=8, head_deadline=0.2) as port,
        connect(port) as connection,
        contextlib.suppress(ConnectionError),  # the server can disconnect before the client has sent everything
    ):
        connection.sendall(sent)
        assert read_to_end(connection) == b""


def test_too_long_headers_are_refused():
    with served(limit=8) as port, connect(port) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100_000)
        with contextlib.suppress(ConnectionResetError):
            assert b" 400 " in read_to_end(connection)


def test_connection_over_the_limit_gets_503():
    with served(limit=2) as port:
        with connect(port) as first, connect(port) as second, connect(port) as third:
            answer = read_to_end(third)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b" 503 " in head and b"Retry-After" in head
            assert f"Content-Length: {len(body)}".encode() in head
            for connection in (first, second):
                connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert read_to_end(connection).endswith(b"ok")
        assert httpx.get(f"http://127.0.0.1:{port}/", timeout=DEADLINE).text == "ok"


def refused(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/", timeout=DEADLINE).status_code == 503
    except httpx.TransportError:  # the server disconnected before the client read the response
        return True


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
def test_client_that_does_not_read_is_disconnected(more):
    with served(limit=1, read_deadline=0.2) as port, connect(port) as connection:
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n" + more + b"\r\n")
        assert connection.recv(1) == b"H"
        wait_until(lambda: not refused(port))  # the server accepts a new client after it has disconnected this one
        assert len(read_to_end(connection)) < LARGE


def test_client_that_reads_gets_a_large_response():
    with served(limit=8, read_deadline=DEADLINE) as port:
        assert len(httpx.get(f"http://127.0.0.1:{port}/large", timeout=DEADLINE).content) == LARGE


def test_read_deadline_restarts_with_each_part():
    """The client gets the full `read_deadline` for each part of the response."""
    with served(limit=8, read_deadline=4.0) as port, connect(port) as connection:
        connection.sendall(b"GET /parts HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        read = 0
        while read < LARGE // 4:
            read += len(connection.recv(1 << 20))
        time.sleep(4.0)
        while more := len(connection.recv(1 << 20)):
            read += more
        assert read > sum(PARTS["/parts"])


def test_body_that_does_not_arrive_in_time_gets_408():
    async def test():
        sent = []

        async def receive():
            await asyncio.sleep(DEADLINE)

        async def send(message):
            sent.append(message)

        reader = ReadBody(_answer, limit=100, raw=(), deadline=0.05)
        await reader({"type": "http", "path": "/", "headers": [(b"content-length", b"9")]}, receive, send)
        assert sent[0]["status"] == 408

    asyncio.run(test())
