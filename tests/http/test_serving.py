"""Test the addresses that a service listens at, and the progress that its event loop reports."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest

from tests.waiting import wait_until

pytest.importorskip("uvicorn", reason="the services need uvicorn: pip install rlframe[trajectories]")

from rlframe.errors import UsageError
from rlframe.http.serving import HttpServer, address_of, listen
from rlframe.interprocess.heartbeat import PhaseStatus, ThreadProgress

release, blocked = threading.Event(), threading.Event()


async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    if scope["path"] == "/block":
        blocked.set()
        release.wait(60.0)  # a deliberate mistake, which blocks the event loop
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@contextlib.contextmanager
def serving() -> Iterator[tuple[str, int]]:
    """Serve the application `app` in a thread. Yield (URL, identifier of the thread)."""
    listener = listen("127.0.0.1", 0)
    ready = threading.Event()
    server = HttpServer(app, 10, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert ready.wait(60.0) and thread.ident is not None
    try:
        yield f"http://{address_of(listener)}", thread.ident
    finally:
        release.set()
        server.should_exit = True
        thread.join(60.0)
        listener.close()
        assert not thread.is_alive()


def test_blocked_event_loop_reports_no_progress():
    progress = ThreadProgress()
    with serving() as (url, ident):

        def phase_status() -> PhaseStatus:
            found = progress.look(time.monotonic(), ident)
            assert found is not None and found.phase.name == "serving"
            return found

        for _ in range(3):
            wait_until(lambda: phase_status().seconds > 0.0)
            wait_until(lambda: phase_status().seconds == 0.0)  # the event loop has made progress
        client = threading.Thread(target=lambda: urllib.request.urlopen(f"{url}/block").close())
        client.start()
        assert blocked.wait(60.0)
        wait_until(lambda: phase_status().seconds >= 2.0)
        assert "release.wait(60.0)" in phase_status().where()
        release.set()
        client.join()
        wait_until(lambda: phase_status().seconds <= 1.0)


def test_log_handlers_of_the_process_stay_open(tmp_path):
    handler = logging.FileHandler(tmp_path / "own.log", mode="w")
    logger = logging.getLogger("of.a.user")
    logger.addHandler(handler)
    try:
        with serving():
            logger.warning("still here")
    finally:
        logger.removeHandler(handler)
        handler.close()
    assert (tmp_path / "own.log").read_text() == "still here\n"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_service_listens_at_ipv4_and_ipv6_addresses(host):
    listener = listen(host, 0)
    try:
        port = listener.getsockname()[1]
        socket.create_connection(("::1" if host == "::1" else "127.0.0.1", port), 10.0).close()  # :: also accepts IPv4
        with pytest.raises(UsageError, match=f"Port {port} of {host} is in use"):
            listen(host, port)
    finally:
        listener.close()


@pytest.mark.parametrize(
    ("host", "port", "why"),
    [
        ("127.0.0.1", 70_000, "A port must be from 0 to 65535, got 70000"),
        ("nowhere.invalid", 80, "nowhere.invalid:80 is not a valid address to listen at"),
        ("192.0.2.1", 0, "The service cannot listen at 192.0.2.1:0"),
    ],
)
def test_invalid_listen_address_is_refused(host, port, why):
    with pytest.raises(UsageError, match=why):
        listen(host, port)
