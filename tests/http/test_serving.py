"""A service whose event loop is held up says so, and one whose loop turns does not."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest

from tests.waiting import wait_until

pytest.importorskip("uvicorn", reason="the services need uvicorn: pip install rlframe[trajectories]")

from rlframe.http.serving import Server, address_of, listen
from rlframe.interprocess.progress import Progress, Stay

release, held = threading.Event(), threading.Event()


async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    if scope["path"] == "/hold":
        held.set()
        release.wait(60.0)  # what no coroutine may do
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@contextlib.contextmanager
def serving() -> Iterator[str]:
    listener = listen("127.0.0.1", 0)
    ready = threading.Event()
    server = Server(app, 10, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert ready.wait(30.0)
    try:
        yield f"http://{address_of(listener)}"
    finally:
        release.set()
        server.should_exit = True
        thread.join(30.0)
        listener.close()
        assert not thread.is_alive()


def serving_stay(progress: Progress) -> Stay:
    stay = progress.look(time.monotonic())
    assert stay is not None and stay.phase.name == "serving"
    return stay


def test_an_event_loop_that_is_held_up_makes_no_progress():
    progress = Progress()
    with serving() as url:
        ends = time.monotonic() + 2.0
        while time.monotonic() < ends:
            assert serving_stay(progress).seconds < 1.5
            time.sleep(0.2)
        asks = threading.Thread(target=lambda: urllib.request.urlopen(f"{url}/hold").close())
        asks.start()
        assert held.wait(30.0)
        wait_until(lambda: serving_stay(progress).seconds >= 2.0)
        assert "release.wait(60.0)" in serving_stay(progress).where()
        release.set()
        asks.join()
        wait_until(lambda: serving_stay(progress).seconds <= 1.0)
