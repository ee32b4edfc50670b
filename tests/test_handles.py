"""Tests of calls through handles with each transport: choice of the peer, retries, deadlines and errors."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rlframe import handles
from rlframe.errors import PeerError, RemoteError, StoppedError, UnavailableError, UsageError
from rlframe.handles import AsyncCall, Poller, Remote, resolve
from rlframe.transport import DEFAULT
from rlframe.transport.sockets import SocketDirectory, SocketTransport
from tests.extras import needs
from tests.in_process import InProcess
from tests.waiting import wait_until

NUMBERS = itertools.count()  # source of numbers for distinct addresses


class Node:
    """A node that counts its calls. The first `refuses` calls raise UnavailableError."""

    def __init__(self, name: str = "node", refuses: int = 0) -> None:
        self._name, self._refuses, self._calls = name, refuses, 0

    def double(self, array):
        self._calls += 1
        if self._calls <= self._refuses:
            raise UnavailableError("not yet")
        return 2 * array

    def name(self):
        return self._name

    def calls(self):
        return self._calls

    def misuse(self):
        raise UsageError("observation should be [B, 2]")

    def fail(self):
        raise KeyError("missing")


class ByCourier:
    """Nodes that communicate through Launchpad's Courier."""

    transport = DEFAULT

    def address(self) -> str:
        from tests.ports import free_address

        return free_address()

    def serving(self, instance: Any, address: str) -> Any:
        from tests.serving import serving

        return serving(instance, address)

    def client(self, address: str) -> Any:
        from tests.serving import client

        return client(address)


class ByQueues:
    """Nodes that communicate through queues in this process."""

    transport: Any = InProcess()

    def address(self) -> str:
        return f"peer-{next(NUMBERS)}"

    @contextlib.contextmanager
    def serving(self, instance: Any, address: str) -> Iterator[None]:
        methods = {name: getattr(instance, name) for name in dir(instance) if not name.startswith("_")}
        node = self.transport.serve(methods, address)
        try:
            yield
        finally:
            node.stop()

    def client(self, address: str) -> Remote:
        return Remote([address], "client", transport=self.transport)


class BySockets(ByQueues):
    """Nodes that communicate through Unix sockets, as with the `local` engine."""

    transport: Any = SocketTransport()

    def __init__(self) -> None:
        self.directory = SocketDirectory()

    def address(self) -> str:
        return f"{self.directory.path}/{next(NUMBERS)}"


@pytest.fixture(params=[ByCourier, ByQueues, BySockets])
def by(request) -> Iterator[Any]:
    """Return a transport for the calls. Tests run once for each transport."""
    if request.param is ByCourier:
        needs("launchpad")
    made = request.param()
    yield made
    if request.param is BySockets:
        made.directory.close()


class HasEverything:
    """An object that returns a value for every attribute, as a Courier client does."""

    def __getattr__(self, name):
        return name


@pytest.mark.parametrize("target", [Node(), HasEverything(), None])
def test_plain_object_is_returned_unchanged(target):
    assert resolve(target, "learner") is target


def test_client_call_returns_arrays(by):
    address = by.address()
    with by.serving(Node(), address):
        remote = resolve(by.client(address), "learner")
        assert isinstance(remote, Remote)
        np.testing.assert_array_equal(remote.double(np.arange(3.0)), [0.0, 2.0, 4.0])
        call = AsyncCall(remote, "double", (np.ones(2),))
        np.testing.assert_array_equal(call.result(), [2.0, 2.0])
        assert call.done()


def test_resolve_dereferences_a_launchpad_handle():
    needs("launchpad")
    import launchpad as lp
    from launchpad.launch.test_multi_threading import address_builder

    node = lp.CourierNode(Node)
    handle = node.create_handle()
    address_builder.bind_addresses([node])
    with ByCourier().serving(Node(), handle._address.resolve()):
        assert resolve(handle, "learner").name() == "node"


def test_remote_can_be_pickled(by):
    address = by.address()
    with by.serving(Node(), address):
        remote = pickle.loads(pickle.dumps(resolve(by.client(address), "learner", deadline=1.0)))
        assert remote.name() == "node"
    with pytest.raises(PeerError, match="within 1 s"):
        remote.name()


def test_remote_call_keeps_the_type_of_an_rlframe_error_and_the_traceback_of_other_errors(by):
    address = by.address()
    with by.serving(Node(), address):
        remote = resolve(by.client(address), "learner")
        with pytest.raises(UsageError, match=r"^observation should be \[B, 2\]$") as raised:
            remote.misuse()
        assert f"The learner at {address} raised in misuse()" in str(raised.value.__cause__)
        with pytest.raises(RemoteError, match=rf"learner at {address} raised in fail\(\)(.|\n)*KeyError: 'missing'"):
            remote.fail()
        with pytest.raises(RemoteError, match=rf"learner at {address} raised in nosuch\(\)(.|\n)*nosuch"):
            remote.nosuch()


def test_unavailable_error_is_retried(by):
    address = by.address()
    with by.serving(Node(refuses=2), address):
        remote = resolve(by.client(address), "inferencer")
        assert remote.double(4) == 8
        assert remote.calls() == 3


@pytest.mark.parametrize("asynchronous", [False, True])
def test_dead_peer_raises_peer_error_at_the_deadline(by, asynchronous):
    address = by.address()
    remote = resolve(by.client(address), "inferencer", deadline=0.5)
    began = time.monotonic()
    with pytest.raises(PeerError, match=rf"The inferencer at {address} did not answer name\(\) within 0.5 s"):
        AsyncCall(remote, "name", ()).result() if asynchronous else remote.name()
    assert time.monotonic() - began < 60.0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_restarted_peer_is_called_at_the_same_address(by, asynchronous):
    address = by.address()
    remote = resolve(by.client(address), "learner")
    with by.serving(Node("first"), address):
        assert remote.name() == "first"
    done = threading.Event()

    def come_back() -> None:
        done.wait(0.5)  # The peer is down for 0.5 s.
        with by.serving(Node("second"), address):
            done.wait(60.0)

    thread = threading.Thread(target=come_back)
    thread.start()
    try:
        assert (AsyncCall(remote, "name", ()).result() if asynchronous else remote.name()) == "second"
    finally:
        done.set()
        thread.join()


def test_warning_is_logged_only_for_a_peer_that_has_answered_before(by, monkeypatch, caplog):
    monkeypatch.setattr(handles, "_WARN_AFTER", 0.0)
    looks, is_reachable, address = [], by.transport.is_reachable, by.address()

    def look(transport, where):
        looks.append(where)
        return is_reachable(where)

    monkeypatch.setattr(type(by.transport), "is_reachable", look)
    remote = resolve(by.client(address), "learner")

    def call_before_it_serves(condition):
        answers = []
        thread = threading.Thread(target=lambda: answers.append(remote.name()))
        thread.start()
        wait_until(condition)
        with by.serving(Node("here"), address):
            thread.join(60.0)
        assert answers == ["here"]

    call_before_it_serves(lambda: len(looks) > 3)
    assert not caplog.records
    call_before_it_serves(lambda: caplog.records)
    assert f"The learner at {address} does not answer name()" in caplog.text


def test_other_peers_are_called_only_if_the_preferred_peer_is_dead(by):
    addresses = [by.address() for _ in range(3)]
    clients = [by.client(address) for address in addresses]
    with by.serving(Node("0"), addresses[0]):
        remote = resolve(
            clients, "inferencer", first=5
        )  # The preferred address is the last of the three, because 5 % 3 is 2.
        with by.serving(Node("2"), addresses[2]):
            assert remote.name() == "2"
        assert remote.name() == "0"
        assert remote.name() == "0"
    with pytest.raises(UsageError, match=r"not both: \w+, int"):
        resolve([clients[0], 3], "inferencer")


def test_list_with_handles_of_two_transports_is_refused():
    peers = [Remote(["a:1"], "client"), Remote(["a:1"], "client", transport=InProcess())]
    with pytest.raises(UsageError, match="nodes of one program, or objects, not both: Remote, Remote"):
        resolve(peers, "inferencer")


def test_poller_returns_without_a_wait_and_returns_each_answer_once(by):
    address = by.address()
    poll = Poller(resolve(by.client(address), "learner"), "name")
    assert poll() is None  # No server is running.
    with by.serving(Node("here"), address):
        deadline = time.monotonic() + 60.0
        while (answer := poll()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert answer == "here"


def test_stop_event_ends_the_wait_for_an_answer(by):
    stop = threading.Event()
    remote = resolve(by.client(by.address()), "learner", stop=stop)
    threading.Timer(0.3, stop.set).start()
    began = time.monotonic()
    with pytest.raises(StoppedError, match=r"learner at \S+ had not answered name\(\) when the caller was stopped"):
        remote.name()
    assert time.monotonic() - began < 60.0
