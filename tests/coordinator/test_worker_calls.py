"""What comes of a call of a worker: by threads of this process, and by real Courier."""

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
    """A worker: what it is told to do with the next calls comes first."""

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
    """Calls the worker."""
    client = transport.connect(server.address)
    return lambda: call_worker(client, "ping")


def boom() -> None:
    raise ValueError("boom")


def refuse() -> None:
    raise UnavailableError("not yet")


def test_an_exception_is_a_reply(worker: Answering, ping: Callable[[], WorkerReply]) -> None:
    worker.does = [boom]
    reply = ping()
    assert isinstance(reply, Failed) and "ping raised: " in reply.message and "boom" in reply.message
    assert not reply.is_permanent
    assert ping() == HERE  # the next call is answered as ever


def test_what_is_no_reply_is_an_error_of_the_workers(worker: Answering, ping: Callable[[], WorkerReply]) -> None:
    worker.does = [lambda: 7]
    assert ping() == Failed("TypeError", "ping must return a WorkerReply, got int")


def test_a_worker_that_says_it_cannot_just_now_is_no_answer(worker: Answering, ping: Callable[[], WorkerReply]) -> None:
    worker.does = [refuse]
    with pytest.raises(UnavailableError, match="not yet"):
        ping()


def test_nobody_at_an_address_is_no_answer(server: Server, ping: Callable[[], WorkerReply]) -> None:
    server.stop()
    with pytest.raises(UnavailableError):
        ping()
