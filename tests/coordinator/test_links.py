"""Calls of workers in other processes."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

pytest.importorskip("courier", reason="dm-launchpad is not installed: pip install rlframe[launchpad]")
import courier

from rlframe.coordinator.links import Links
from rlframe.coordinator.messages import Alive


@pytest.fixture
def server():
    """A worker that answers `ping` once it may."""
    began, may = threading.Event(), threading.Event()

    def ping() -> Alive:
        began.set()
        may.wait(10.0)
        return Alive("collector/0", 0, "idle")

    served = courier.Server()
    served.Bind("ping", ping)
    served.Start()
    yield f"localhost:{served.port}", began, may
    may.set()
    served.Stop()


def test_a_connection_that_is_dropped_goes_at_once_though_an_answer_is_still_to_come(server):
    address, began, may = server
    links, answers = Links(), []
    links.open("collector/0", 0, address)
    links.call("collector/0", 0, "ping", (), lambda reply, why: answers.append(reply))
    assert began.wait(10.0)
    client = weakref.ref(links._links["collector/0", 0])
    links.shut("collector/0", 0)
    gc.collect()
    assert client() is None  # what would drop it later is the thread that brings the answer, and the process aborts
    links.open("collector/0", 1, address)
    arrived = threading.Event()
    may.set()
    links.call("collector/0", 1, "ping", (), lambda reply, why: (answers.append(reply), arrived.set()))
    assert arrived.wait(10.0)
    assert len(answers) == 1
    links.close()
