"""Tests of calls to workers, through threads of this process and through real Courier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlframe.coordinator.messages import Alive, Failed, WorkerReply
from rlframe.coordinator.worker_calls import call_worker
from rlframe.errors import UnavailableError
from rlframe.transport import DEFAULT, Server, Transport
from tests.extras import needs
from tests.in_process import InProcess

HERE = Alive("collector/0", 2, "idle")


class Answering:
    """A worker with scripted replies. `does` contains one function for each of the next calls."""

    def __init__(self) -> None:
        self.does: list[Callable[[], Any]] = []

    def ping(self) -> Any:
        return self.does.pop(0)() if self.does else HERE


@pytest.fixture(params=[InProcess(), DEFAULT], ids=["threads", "courier"])
def transport(request: pytest.FixtureRequest) -> Transport:
    if request.param == DEFAULT:
        needs("launchpad")
    return request.param


@pytest.fixture
def worker() -> Answering:
    return Answering()


@pytest.fixture
def server(transport: Transport, worker: Answering) -> Iterator[Server]:
    server = transport.serve({"ping": worker.ping})
    yield server
    server.stop()


@pytest.fixture
def ping(transport: Transport, server: Server) -> Callable[[], WorkerReply]:
    """Return a function that pings the worker."""
    client = transport.connect(server.address)
    return lambda: call_worker(client, "ping")


def boom() -> None:
    raise ValueError("boom")


def refuse() -> None:
    raise UnavailableError("not yet")


def test_exception_becomes_a_failed_reply(worker: Answering, ping: Callable[[], WorkerReply]) -> None:
    worker.does = [boom]
    reply = ping()
    assert isinstance(reply, Failed) and "ping raised: " in reply.message and "boom" in reply.message
    assert not reply.is_permanent
    assert ping() == HERE  # the next call returns a normal reply


def test_reply_of_a_wrong_type_becomes_a_failed_reply(worker: Answering, ping: Callable[[], WorkerReply]) -> None:
    worker.does = [lambda: 7]
    assert ping() == Failed("TypeError", "ping must return a WorkerReply, got int")


def test_unavailable_error_of_the_worker_is_raised(worker: Answering, ping: Callable[[], WorkerReply]) -> None:
    worker.does = [refuse]
    with pytest.raises(UnavailableError, match="not yet"):
        ping()


def test_unused_address_raises_unavailable_error(server: Server, ping: Callable[[], WorkerReply]) -> None:
    server.stop()
    with pytest.raises(UnavailableError):
        ping()
