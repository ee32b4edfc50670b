"""Tests of the servers and clients of all transports: errors, addresses, and concurrent calls."""

from __future__ import annotations

import concurrent.futures
import pathlib
import tempfile
import threading
from collections.abc import Iterator

import pytest

from rlframe.errors import FieldError, NoMethodError, RemoteError, UnavailableError, UsageError
from rlframe.transport import DEFAULT, Transport
from rlframe.transport.sockets import SocketTransport
from tests.extras import needs
from tests.in_process import InProcess
from tests.two_ray_nodes import two_ray_nodes


@pytest.fixture(params=[InProcess(), SocketTransport(), None, DEFAULT], ids=["threads", "sockets", "ray", "courier"])
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    if request.param == DEFAULT:
        needs("launchpad")
    if request.param is None:
        with tempfile.TemporaryDirectory(dir="/tmp") as directory, two_ray_nodes(pathlib.Path(directory)) as ray_nodes:
            yield ray_nodes
            assert list(pathlib.Path(directory, "there").iterdir()) == []
        assert not pathlib.Path(directory).exists()
    else:
        yield request.param


def misuse() -> None:
    raise UsageError("observation should be [B, 2]")


def refuse() -> None:
    raise UnavailableError("not yet")


def fail() -> None:
    raise KeyError("missing")


def add(left: int, right: int = 1) -> int:
    return left + right


def exceed() -> None:
    raise FieldError("n must be at most 8", "n")


METHODS = {each.__name__: each for each in (add, misuse, refuse, fail, exceed)}


def test_transport_keeps_the_types_of_rlframe_errors_and_the_tracebacks_of_other_errors(transport):
    server = transport.serve(METHODS)
    client = transport.connect(server.address)
    assert client.call("add", 1, right=3) == 4
    assert client.submit("add", 1).result() == 2
    for method, kind, said in (
        ("misuse", UsageError, r"^observation should be \[B, 2\]$"),
        ("refuse", UnavailableError, "not yet"),
        ("exceed", FieldError, "^n must be at most 8$"),
        ("fail", RemoteError, r"(.|\n)*KeyError: 'missing'"),
        ("nosuch", NoMethodError, "nosuch"),
    ):
        for result in (lambda method=method: client.call(method), client.submit(method).result):
            with pytest.raises(kind, match=said) as raised:
                result()
            assert type(raised.value) is kind
    server.stop()


def test_address_is_reachable_only_while_a_node_serves(transport):
    server = transport.serve(METHODS)
    address, client = server.address, transport.connect(server.address)
    assert transport.is_reachable(address) and client.call("add", 1) == 2
    server.stop()
    assert not transport.is_reachable(address)
    with pytest.raises(UnavailableError):
        client.call("add", 1)
    with pytest.raises(UnavailableError):
        client.submit("add", 1).result()
    if pathlib.Path(address).is_absolute():  # The stopped server has removed its directory, so create it again.
        pathlib.Path(address).parent.mkdir(mode=0o700)
    again = transport.serve(METHODS, address)
    assert again.address == address and transport.is_reachable(address)
    again.stop()
    if pathlib.Path(address).is_absolute():
        pathlib.Path(address).parent.rmdir()


def test_concurrent_servers_have_distinct_addresses(transport):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        servers = list(pool.map(lambda number: transport.serve({"number": lambda: number}), range(24)))
    assert [transport.connect(server.address).call("number") for server in servers] == list(range(24))
    for server in servers:
        server.stop()


def test_client_can_be_deleted_during_its_call(transport):
    called, goes_on = threading.Event(), threading.Event()

    def wait() -> int:
        called.set()
        goes_on.wait(20.0)
        return 7

    server = transport.serve({"wait": wait})
    future = transport.connect(server.address).submit("wait")
    assert called.wait(20.0)
    goes_on.set()
    assert future.result() == 7
    server.stop()
