"""Calls of workers: by threads of this process, and by real Courier."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlframe.coordinator.links import Links
from rlframe.coordinator.messages import Alive, Failed, Reply
from rlframe.coordinator.workers.process import Server
from rlframe.errors import UnavailableError
from rlframe.transport import DEFAULT, Transport
from tests.extras import needs
from tests.in_process import InProcess

WITHIN = 60.0  # seconds


class Answering:
    """A worker: what it is told to do with the next calls comes first."""

    def __init__(self) -> None:
        self.does: list[Callable[[], Any]] = []
        self.called = threading.Event()

    def ping(self) -> Any:
        self.called.set()
        return self.does.pop(0)() if self.does else Alive("collector/0", 2, "idle")


class Heard:
    """Takes the answers to calls."""

    def __init__(self) -> None:
        self._answers: queue.Queue[tuple[Reply | None, str]] = queue.Queue()
        self.count = 0

    def __call__(self, reply: Reply | None, why: str) -> None:
        self.count += 1
        self._answers.put((reply, why))

    def next(self) -> tuple[Reply | None, str]:
        return self._answers.get(timeout=WITHIN)


@pytest.fixture(params=[InProcess(), DEFAULT], ids=["threads", "courier"])
def transport(request: pytest.FixtureRequest) -> Transport:
    if request.param == DEFAULT:
        needs("launchpad")
    return request.param


@pytest.fixture
def links(transport: Transport) -> Iterator[Links]:
    links = Links(transport)
    yield links
    links.close()


@pytest.fixture
def serve(transport: Transport) -> Iterator[Callable[[Answering], str]]:
    """Has a worker served, and gives its address."""
    with contextlib.ExitStack() as servers:

        def start(worker: Answering) -> str:
            server = Server(worker, transport)
            servers.callback(server.stop)
            return server.address

        yield start


@pytest.fixture
def worker(links: Links, serve: Callable[[Answering], str]) -> Answering:
    """Called as ("collector/0", 2)."""
    worker = Answering()
    links.open("collector/0", 2, serve(worker))
    return worker


def call(links: Links, heard: Heard, incarnation: int = 2) -> None:
    links.call("collector/0", incarnation, "ping", (), heard)


def boom() -> None:
    raise ValueError("boom")


def test_an_answer_comes_to_who_asked(links: Links, worker: Answering) -> None:
    heard = Heard()
    call(links, heard)
    assert heard.next() == (Alive("collector/0", 2, "idle"), "")


def test_an_exception_is_an_answer(links: Links, worker: Answering) -> None:
    worker.does, heard = [boom], Heard()
    call(links, heard)
    reply, why = heard.next()
    assert isinstance(reply, Failed) and "ping raised: " in reply.message and "boom" in reply.message and why == ""
    assert not reply.for_good
    call(links, heard)  # the next call is answered as ever
    assert heard.next()[0] == Alive("collector/0", 2, "idle")


def test_what_is_no_reply_is_an_error_of_the_workers(links: Links, worker: Answering) -> None:
    worker.does, heard = [lambda: 7], Heard()
    call(links, heard)
    assert heard.next() == (Failed("TypeError", "ping must give a Reply, it gave int"), "")


def test_the_late_answer_of_a_link_that_was_shut_is_nobodys(
    links: Links, worker: Answering, serve: Callable[[Answering], str]
) -> None:
    goes_on, late, heard = threading.Event(), Heard(), Heard()
    ended = threading.Event()

    def wait() -> Alive:
        goes_on.wait(WITHIN)
        ended.set()
        return Alive("collector/0", 2, "running")

    worker.does = [wait]
    call(links, late)
    assert worker.called.wait(WITHIN)
    links.shut("collector/0", 2)
    call(links, heard)
    assert heard.next() == (None, "there is no connection")
    links.open("collector/0", 3, serve(worker))  # another incarnation
    goes_on.set()
    assert ended.wait(WITHIN)
    call(links, heard, 3)
    assert heard.next()[0] == Alive("collector/0", 2, "idle")
    assert late.count == 0


def test_another_incarnation_is_another_worker(links: Links, worker: Answering) -> None:
    heard = Heard()
    call(links, heard, 1)
    assert heard.next() == (None, "there is no connection") and not worker.called.is_set()


def test_a_worker_that_hangs_does_not_keep_others_waiting(
    links: Links, worker: Answering, serve: Callable[[Answering], str]
) -> None:
    goes_on, late, heard, other = threading.Event(), Heard(), Heard(), Answering()
    worker.does = [lambda: goes_on.wait(WITHIN) and Alive("collector/0", 2, "running")]
    call(links, late)
    links.open("collector/1", 0, serve(other))
    links.call("collector/1", 0, "ping", (), heard)
    assert heard.next()[0] == Alive("collector/0", 2, "idle") and late.count == 0
    goes_on.set()
    assert late.next()[0] == Alive("collector/0", 2, "running")


def test_nobody_at_an_address_is_no_answer(links: Links, transport: Transport) -> None:
    server = Server(Answering(), transport)
    server.stop()
    heard = Heard()
    links.open("collector/0", 2, server.address)
    call(links, heard)
    reply, why = heard.next()
    assert reply is None and why


def test_a_worker_that_says_it_cannot_just_now_is_no_answer(links: Links, worker: Answering) -> None:
    def refuse() -> None:
        raise UnavailableError("not yet")

    worker.does, heard = [refuse], Heard()
    call(links, heard)
    assert heard.next() == (None, "not yet")
