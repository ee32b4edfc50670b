"""Calls of workers: in this process, and by real Courier."""

from __future__ import annotations

import pathlib
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlframe.coordinator.links import Links
from rlframe.coordinator.messages import Alive, Failed, Reply
from rlframe.coordinator.workers.process import Server
from tests.ports import free_address

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


@pytest.fixture
def links() -> Iterator[Links]:
    links = Links()
    yield links
    links.close()


@pytest.fixture(params=["here", "courier"])
def worker(request: pytest.FixtureRequest, links: Links) -> Iterator[Answering]:
    """Called as ("collector/0", 2)."""
    worker = Answering()
    if request.param == "here":
        links.open("collector/0", 2, worker)
        yield worker
        return
    server = Server(worker)
    links.open("collector/0", 2, f"localhost:{server.port}")
    yield worker
    server.stop()


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


def test_the_late_answer_of_a_link_that_was_shut_is_nobodys(links: Links, worker: Answering) -> None:
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
    links.open("collector/0", 3, worker)  # another incarnation
    goes_on.set()
    assert ended.wait(WITHIN)
    call(links, heard, 3)
    assert heard.next()[0] == Alive("collector/0", 2, "idle")
    assert late.count == 0


def test_another_incarnation_is_another_worker(links: Links, worker: Answering) -> None:
    heard = Heard()
    call(links, heard, 1)
    assert heard.next() == (None, "there is no connection") and not worker.called.is_set()


def test_a_worker_that_hangs_does_not_keep_others_waiting(links: Links, worker: Answering) -> None:
    goes_on, late, heard, other = threading.Event(), Heard(), Heard(), Answering()
    worker.does = [lambda: goes_on.wait(WITHIN) and Alive("collector/0", 2, "running")]
    call(links, late)
    links.open("collector/1", 0, other)
    links.call("collector/1", 0, "ping", (), heard)
    assert heard.next()[0] == Alive("collector/0", 2, "idle") and late.count == 0
    goes_on.set()
    assert late.next()[0] == Alive("collector/0", 2, "running")


def test_nobody_at_an_address_is_no_answer(links: Links) -> None:
    heard = Heard()
    links.open("collector/0", 2, free_address())
    call(links, heard)
    reply, why = heard.next()
    assert reply is None and why


def test_a_connection_that_broke_in_a_call_is_no_answer(links: Links) -> None:
    def broke() -> None:
        raise ConnectionResetError("gone")

    worker, heard = Answering(), Heard()
    worker.does = [broke]
    links.open("collector/0", 2, worker)
    call(links, heard)
    assert heard.next() == (None, "gone")


def test_a_worker_here_that_never_answers_does_not_keep_the_program_from_ending(tmp_path: pathlib.Path) -> None:
    program = """
import threading
from rlframe.coordinator.links import Links

class Hangs:
    def ping(self):
        asked.set()
        threading.Event().wait()

asked, links = threading.Event(), Links()
links.open("collector/0", 0, Hangs())
links.call("collector/0", 0, "ping", (), print)
assert asked.wait(60.0)
links.close()
print("closed", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120.0)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
