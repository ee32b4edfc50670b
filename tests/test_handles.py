"""Handles: who is called, how long for, and what is said where nobody answers."""

from __future__ import annotations

import pickle
import threading
import time

import numpy as np
import pytest

from rlframe import handles
from rlframe.errors import PeerError, RemoteError, StoppedError, UnavailableError, UsageError
from rlframe.handles import Call, Remote, resolve
from tests.ports import free_address
from tests.serving import client, serving
from tests.waiting import wait_until


class Node:
    """Counts its calls, and refuses the first ones if told to."""

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


class HasEverything:
    """Answers hasattr for every name, as a Courier client does."""

    def __getattr__(self, name):
        return name


@pytest.mark.parametrize("target", [Node(), HasEverything(), None])
def test_an_object_is_returned_as_it_is(target):
    assert resolve(target, "learner") is target


def test_a_client_is_called_and_arrays_come_back():
    address = free_address()
    with serving(Node(), address):
        remote = resolve(client(address), "learner")
        assert isinstance(remote, Remote)
        np.testing.assert_array_equal(remote.double(np.arange(3.0)), [0.0, 2.0, 4.0])
        call = Call(remote, "double", (np.ones(2),))
        np.testing.assert_array_equal(call.result(), [2.0, 2.0])
        assert call.done()


def test_a_launchpad_handle_that_was_not_dereferenced_is_resolved_by_its_type():
    import launchpad as lp
    from launchpad.launch.test_multi_threading import address_builder

    node = lp.CourierNode(Node)
    handle = node.create_handle()
    address_builder.bind_addresses([node])
    with serving(Node(), handle._address.resolve()):
        assert resolve(handle, "learner").name() == "node"


def test_a_remote_pickles_as_its_addresses():
    address = free_address()
    with serving(Node(), address):
        remote = pickle.loads(pickle.dumps(resolve(client(address), "learner", deadline=3.0)))
        assert remote.name() == "node"
    with pytest.raises(PeerError, match="within 3 s"):
        remote.name()


def test_a_remote_error_of_ours_keeps_its_type_and_any_other_its_traceback():
    address = free_address()
    with serving(Node(), address):
        remote = resolve(client(address), "learner")
        with pytest.raises(UsageError, match=r"^observation should be \[B, 2\]$"):
            remote.misuse()
        with pytest.raises(RemoteError, match=rf"learner at {address} raised in fail\(\)(.|\n)*KeyError: 'missing'"):
            remote.fail()
        with pytest.raises(RemoteError, match="nosuch"):
            remote.nosuch()


def test_a_refusal_that_may_pass_is_called_again():
    address = free_address()
    with serving(Node(refuses=2), address):
        remote = resolve(client(address), "inferencer")
        assert remote.double(4) == 8
        assert remote.calls() == 3


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_peer_that_is_dead_is_an_error_that_names_it_within_the_deadline(asynchronous):
    address = free_address()
    remote = resolve(client(address), "inferencer", deadline=1.5)
    began = time.monotonic()
    with pytest.raises(PeerError, match=rf"The inferencer at {address} did not answer name\(\) within 1.5 s"):
        Call(remote, "name", ()).result() if asynchronous else remote.name()
    assert time.monotonic() - began < 60.0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_peer_that_comes_back_at_its_address_is_found_again(asynchronous):
    address = free_address()
    remote = resolve(client(address), "learner")
    with serving(Node("first"), address):
        assert remote.name() == "first"
    done = threading.Event()

    def come_back() -> None:
        done.wait(2.0)  # it is down for as long as this
        with serving(Node("second"), address):
            done.wait(60.0)

    thread = threading.Thread(target=come_back)
    thread.start()
    try:
        assert (Call(remote, "name", ()).result() if asynchronous else remote.name()) == "second"
    finally:
        done.set()
        thread.join()


def test_a_peer_that_has_not_answered_yet_may_take_its_time_to_start_and_only_a_silent_one_is_warned_of(
    monkeypatch, caplog
):
    monkeypatch.setattr(handles, "_WARN_AFTER", 0.0)
    looks, listens, address = [], handles._listens, free_address()

    def look(where):
        looks.append(where)
        return listens(where)

    monkeypatch.setattr(handles, "_listens", look)
    remote = resolve(client(address), "learner")

    def call_before_it_serves(condition):
        answers = []
        thread = threading.Thread(target=lambda: answers.append(remote.name()))
        thread.start()
        wait_until(condition)
        with serving(Node("here"), address):
            thread.join(60.0)
        assert answers == ["here"]

    call_before_it_serves(lambda: len(looks) > 3)
    assert not caplog.records
    call_before_it_serves(lambda: caplog.records)
    assert f"The learner at {address} does not answer name()" in caplog.text


def test_of_several_the_preferred_one_is_called_and_the_others_while_it_is_dead():
    addresses = [free_address() for _ in range(3)]
    clients = [client(address) for address in addresses]
    with serving(Node("0"), addresses[0]):
        remote = resolve(clients, "inferencer", first=5)  # 5 % 3: the last
        with serving(Node("2"), addresses[2]):
            assert remote.name() == "2"
        assert remote.name() == "0"
        assert remote.name() == "0"
    with pytest.raises(UsageError, match="not both: Client, int"):
        resolve([clients[0], 3], "inferencer")


def test_a_stop_ends_the_waiting():
    stop = threading.Event()
    remote = resolve(client(free_address()), "learner", stop=stop)
    threading.Timer(0.3, stop.set).start()
    began = time.monotonic()
    with pytest.raises(StoppedError, match="Told to stop"):
        remote.name()
    assert time.monotonic() - began < 60.0
