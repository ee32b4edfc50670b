"""Tests of calls over Unix sockets: permissions, messages, timeouts, and cleanup."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading

import numpy as np
import pytest

from rlframe.errors import UnavailableError
from rlframe.programs.options.object_names import load_object
from rlframe.transport import base, sockets
from rlframe.transport.sockets import SocketDirectory, SocketTransport
from tests.waiting import wait_until

ROOT = pathlib.Path(__file__).parents[1]
NOBODY = 65534  # id of the user `nobody`, which exists on all systems

TRANSPORT = SocketTransport()

as_another = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


def echo(value):
    return value


@pytest.fixture
def server():
    made = TRANSPORT.serve({"echo": echo})
    yield made
    made.stop()


def as_nobody(code: str) -> list[str]:
    """Return a command that runs Python code as the user `nobody`."""
    return [
        sys.executable,
        "-c",
        f"import os, socket, sys\nos.setgroups([]); os.setgid(1); os.setuid({NOBODY})\n{code}",
    ]


def run_as_nobody(code: str, *arguments: str) -> str:
    """Run Python code as the user `nobody`. Return its output."""
    return subprocess.run([*as_nobody(code), *arguments], capture_output=True, text=True).stdout


@pytest.fixture
def open_directory():
    """Return a directory that all users can write to."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o777)
        yield pathlib.Path(directory)


CALL = """
connection = socket.socket(socket.AF_UNIX)
try:
    connection.connect(sys.argv[1])
    connection.settimeout(20.0)
    connection.sendall(bytes.fromhex(sys.argv[2]))
    print("answered" if connection.recv(1) else "closed")
except OSError as error:
    print(type(error).__name__)
"""

SERVE = """
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
listener.listen()
print("listens", flush=True)
connection, _ = listener.accept()
connection.settimeout(20.0)
print(len(connection.recv(1000)), "bytes", flush=True)
"""


def request(method: str, *args: object) -> str:
    """Return the message for a call, as a hexadecimal string."""
    left, right = socket.socketpair()
    with left, right:
        base.send(left, base.pack((method, args, {})))
        return right.recv(10_000).hex()


@as_another
def test_another_user_cannot_enter_the_socket_directory(server):
    assert os.stat(pathlib.Path(server.address).parent).st_mode & 0o777 == 0o700
    assert run_as_nobody(CALL, server.address, request("echo", 1)).strip() == "PermissionError"


class Loud:
    """A class whose objects append an item to the list `unpickled` when they are unpickled."""

    def __reduce__(self):
        return unpickled.append, ("somebody",)


unpickled: list[str] = []


@as_another
def test_server_reads_nothing_from_another_user(open_directory):
    server = TRANSPORT.serve({"echo": echo}, str(open_directory / "s"))
    os.chmod(server.address, 0o777)
    loud = request("echo", Loud())
    unpickled.clear()
    assert run_as_nobody(CALL, server.address, loud).strip() in ("closed", "ConnectionResetError", "BrokenPipeError")
    assert unpickled == []
    assert TRANSPORT.connect(server.address).call("echo", 3) == 3
    server.stop()


@as_another
def test_client_sends_nothing_to_a_server_of_another_user(open_directory):
    path = str(open_directory / "s")
    with subprocess.Popen([*as_nobody(SERVE), path], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "listens\n"
        with pytest.raises(UnavailableError, match=f"belongs to the user {NOBODY}"):
            TRANSPORT.connect(path).call("echo", 1)
        assert other.stdout.readline() == "0 bytes\n"
    assert not TRANSPORT.is_reachable(path)


def test_large_arrays_are_sent_without_pickling_their_data():
    large = {
        "params": np.arange(100_000, dtype=np.float32),
        "rows": [np.full((300, 64), i % 256, np.uint8) for i in range(700)],
    }
    parts = base.pack((large, "small"))
    assert len(parts) == 702 and len(parts[0]) < 100_000
    left, right = socket.socketpair()
    with left, right:
        sender = threading.Thread(target=base.send, args=(left, parts))
        sender.start()
        received, small = base.unpack(base.receive(right))
        sender.join()
    assert small == "small"
    np.testing.assert_array_equal(received["params"], large["params"])
    np.testing.assert_array_equal(received["rows"], large["rows"])
    received["params"][0] = 7.0  # raises if the received array is read-only


def test_object_of_a_user_file_is_sent_by_value(server, tmp_path):
    path = tmp_path / "own.py"
    path.write_text("class Own:\n    def __init__(self, value):\n        self.value = value\n")
    own = load_object(f"{path}:Own", "thing")
    assert TRANSPORT.connect(server.address).call("echo", own(5)).value == 5
    # A process can receive the object even if it has not loaded the user's file.
    reader = """
import sys
from rlframe.transport.sockets import SocketTransport
print(SocketTransport().connect(sys.argv[1]).call("get").value)
"""
    giver = TRANSPORT.serve({"get": lambda: own(6)})
    done = subprocess.run([sys.executable, "-c", reader, giver.address], cwd=ROOT, capture_output=True, text=True)
    giver.stop()
    assert done.stdout == "6\n", done.stderr


def test_late_answer_is_dropped_after_a_call_timeout(monkeypatch):
    monkeypatch.setattr(sockets, "CALL_TIMEOUT", 0.2)
    goes_on = threading.Event()
    server = TRANSPORT.serve({"wait": lambda: goes_on.wait(20.0), "echo": echo})
    client = TRANSPORT.connect(server.address)
    with pytest.raises(UnavailableError, match="no answer within"):
        client.call("wait")
    future = client.submit("wait")
    wait_until(future.done, "the call did not end at its timeout")
    with pytest.raises(UnavailableError, match="no answer within"):
        future.result()
    goes_on.set()
    assert client.call("echo", 4) == 4
    server.stop()


def test_client_reaches_a_replaced_server_at_once():
    directory = SocketDirectory()
    address = f"{directory.path}/s"
    first = TRANSPORT.serve({"echo": echo}, address)
    client = TRANSPORT.connect(address)
    assert client.call("echo", 1) == 1
    first.stop()
    second = TRANSPORT.serve({"echo": lambda value: -value}, address)
    assert client.call("echo", 1) == -1
    second.stop()
    directory.close()
    assert not os.path.exists(directory.path)


def test_socket_paths_are_short_even_if_the_temporary_directory_has_a_long_path(monkeypatch, tmp_path):
    long = tmp_path / ("x" * 150)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    server = TRANSPORT.serve({"echo": echo})
    assert TRANSPORT.connect(server.address).call("echo", 1) == 1
    server.stop()
    assert not os.path.exists(server.address)


def test_socket_directory_of_a_killed_process_is_removed(open_directory):
    code = """
import os, time
from rlframe.transport.sockets import SocketTransport
print(SocketTransport().serve({}).address, flush=True)
time.sleep(600)
"""
    environ = {**os.environ, "TMPDIR": str(open_directory)}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = pathlib.Path(process.stdout.readline().strip())
    assert address.is_socket() and address.is_relative_to(open_directory)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not list(open_directory.iterdir()), f"{list(open_directory.iterdir())} was not removed")
