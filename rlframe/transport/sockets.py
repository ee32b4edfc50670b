"""Unix-domain sockets, by which processes of one user on one machine call each other. Addresses are paths.

They lie in a directory of mode 0700 (`SocketDirectory`), and both ends ask the kernel whose process the other one is
before they read from it: what is received is unpickled. No port is opened on any interface.

Each call under way has a connection of its own, which then waits for the next one: an answer needs no number, and is
read by the thread that wants it. benchmarks/calls.py compares this with what libraries offer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import struct
import subprocess
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from rlframe import errors
from rlframe.errors import NoMethodError, RemoteError, RlframeError, UnavailableError, UsageError
from rlframe.transport import messages
from rlframe.transport.base import CALL_TIMEOUT, MappedFuture

_BACKLOG = 1024  # connections that wait to be taken
_ANSWER_WITHIN = 60  # seconds that a server gives a client to read an answer
_FULL = 0.1  # seconds before a server that has too many open files takes the next connection
_IDLE = 16  # connections that a client keeps for calls to come
_LONGEST = 50  # characters of the directory's place: a socket's whole path may have 107

# It outlives the process that it reads from, even one that is killed, and is no child of it: Ray kills those of its
# actors. A line ends it without removing anything.
_REMOVE_AT_END = """exec 3<&0
{ read _ <&3 || { rm -rf -- "$@"; rmdir -- "$0"; }; } &"""


@dataclasses.dataclass(frozen=True)
class SocketTransport:
    """See `Transport`. A server without an address makes a directory of its own."""

    def connect(self, address: str) -> SocketClient:
        """See `Transport`."""
        return SocketClient(address)

    def is_reachable(self, address: str) -> bool:
        """See `Transport`."""
        try:
            _connected(address, 1.0).close()
        except (OSError, UnavailableError):
            return False
        return True

    def serve(self, methods: Mapping[str, Callable[..., Any]], address: str | None = None) -> SocketServer:
        """See `Transport`."""
        return SocketServer(methods, address)

    def check(self, by: str) -> None:
        """See `Transport`: it needs nothing."""


class SocketClient:
    """See `rlframe.transport.Client`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._idle: list[socket.socket] = []

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """See `Client`."""
        return unpack_answer(self._send(messages.pack((method, args, kwargs))).result())

    def submit(self, method: str, /, *args: Any) -> MappedFuture[SocketFuture]:
        """See `Client`."""
        try:
            sent = self._send(messages.pack((method, args, {})))
        except UnavailableError as error:
            sent = SocketFuture(None, self._idle, error)
        return MappedFuture(sent, lambda future: unpack_answer(future.result()))

    def exchange(self, request: messages.Parts) -> messages.Parts:
        """Return the answer to a packed call (method, args, kwargs), for who passes it on: see `unpack_answer`."""
        return self._send(request).result()

    def _send(self, parts: messages.Parts) -> SocketFuture:
        while True:
            try:
                connection, is_new = self._idle.pop(), False
            except IndexError:
                connection, is_new = self._connect(), True
            try:
                connection.settimeout(CALL_TIMEOUT)
                messages.send(connection, parts)
            except OSError as error:
                connection.close()
                if is_new or isinstance(error, TimeoutError):
                    raise _unavailable(error) from None
                continue  # the server has been restarted since this one was used
            return SocketFuture(connection, self._idle)

    def _connect(self) -> socket.socket:
        try:
            return _connected(self._address, CALL_TIMEOUT)
        except OSError as error:
            raise _unavailable(error) from None


class SocketFuture:
    """See `rlframe.transport.Future`. The result is the packed answer: see `unpack_answer`.

    Args:
        connection: by which the call was sent; None: it was not.
        idle: where the connection goes when the answer is there.
        error: why it was not sent.
    """

    def __init__(
        self, connection: socket.socket | None, idle: list[socket.socket], error: Exception | None = None
    ) -> None:
        self._connection, self._idle = connection, idle
        self._deadline = time.monotonic() + CALL_TIMEOUT
        self._lock = threading.Lock()  # of who reads the answer
        self._parts: messages.Parts = []
        self._error = error

    def done(self) -> bool:
        """See `Future`."""
        connection = self._connection
        if connection is None or time.monotonic() >= self._deadline:
            return True
        try:
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            return bool(poll.poll(0))
        except (OSError, ValueError):  # another thread has read the answer
            return True

    def result(self) -> messages.Parts:
        """See `Future`."""
        with self._lock:
            if self._connection is not None:
                self._take(self._connection)
        if self._error is not None:
            raise self._error
        return self._parts

    def _take(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(max(0.0, self._deadline - time.monotonic()))
            self._parts = messages.receive(connection)
        except (OSError, EOFError) as error:
            connection.close()
            self._error = _unavailable(error)
        else:
            if len(self._idle) < _IDLE:
                self._idle.append(connection)
            else:
                connection.close()
        self._connection = None


class SocketServer:
    """See `rlframe.transport.Server`. Each connection, which has one call at a time, has a thread.

    Args:
        methods: by the names that they are called by.
        path: of the socket; None: in a new directory.
        address: by which clients know it; None: its path.
    """

    def __init__(
        self, methods: Mapping[str, Callable[..., Any]], path: str | None = None, address: str | None = None
    ) -> None:
        self._directory = SocketDirectory() if path is None else None
        self._path = path = f"{self._directory.path}/server" if self._directory is not None else str(path)
        self.address = address or path
        self._methods = methods
        self._connections: set[socket.socket] = set()
        self._stopped = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Under its name once it listens: in the place of a predecessor's that was killed.
        unready = f"{path}.{os.getpid()}"
        self._listener.bind(unready)
        self._listener.listen(_BACKLOG)
        os.rename(unready, path)
        threading.Thread(target=self._accept, name="rlframe server", daemon=True).start()

    def stop(self) -> None:
        """See `Server`."""
        self._stopped = True
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        for connection in (self._listener, *self._connections.copy()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._directory is not None:
            self._directory.close()

    def _accept(self) -> None:
        while not self._stopped:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if not self._stopped:  # too many open files: others may be closed
                    time.sleep(_FULL)
                continue
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="rlframe calls", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        seconds = struct.pack("@ll", _ANSWER_WITHIN, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        try:
            _check_user(connection)
            while not self._stopped:
                self._answer_next(connection)
        except (EOFError, OSError, UnavailableError):
            pass
        finally:
            self._connections.discard(connection)
            connection.close()

    def _answer_next(self, connection: socket.socket) -> None:
        request = messages.receive(connection)
        try:
            method, args, kwargs = messages.unpack(request)
            if method in self._methods:
                answer = messages.pack((self._methods[method](*args, **kwargs),))
            else:
                answer = messages.pack((None, NoMethodError.__name__, f"{self.address} has no method {method}."))
        except Exception as error:
            answer = messages.pack((None, *_described(error)))
        messages.send(connection, answer)


def _connected(address: str, timeout: float) -> socket.socket:
    """Return a connection. Raise OSError if nobody listens, and UnavailableError if another user does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(address)
        _check_user(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_user(connection: socket.socket) -> None:
    """Raise UnavailableError if the process at the other end is another user's."""
    if not hasattr(socket, "SO_PEERCRED"):  # beyond Linux the directory's mode has to do
        return
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("3i", raw)
    if uid != os.geteuid():
        raise UnavailableError(f"the process at the other end is the user {uid}'s")


def _unavailable(error: Exception) -> UnavailableError:
    if isinstance(error, (TimeoutError, BlockingIOError)):
        return UnavailableError(f"no answer within {CALL_TIMEOUT:g} s")
    return UnavailableError(getattr(error, "strerror", None) or str(error))


def _described(error: Exception) -> tuple[str, str, str]:
    """Return an error of a method as it travels: its type in `rlframe.errors`, message and traceback."""
    names = [each.__name__ for each in type(error).__mro__ if each.__module__ == errors.__name__]
    is_ours = names and not isinstance(error, RemoteError)  # else another node's, which this one had called
    return names[0] if is_ours else RemoteError.__name__, str(error), traceback.format_exc()


def unpack_answer(parts: messages.Parts) -> Any:
    """Return the value that a server answered; raises what the method did, as `Client` says."""
    return _value_of(*messages.unpack(parts))


def _value_of(value: Any, name: str | None = None, message: str = "", text: str = "") -> Any:
    if name is None:
        return value
    kind: type[RlframeError] = getattr(errors, name)
    if issubclass(kind, (RemoteError, UnavailableError)):
        raise kind(text or message)
    raise kind(message) from RemoteError(text)


class SocketDirectory:
    """A directory for a program's sockets, which only its user can enter.

    It lies in TMPDIR, or in /tmp if the sockets' paths would be too long. `close` removes it, and so does the end of
    this process, even if it is killed.

    Attributes:
        path: of the directory.
    """

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="rlframe-", dir=socket_parent_directory())  # of mode 0700
        self._finalizer = weakref.finalize(self, remove_at_exit(self.path, self.path))

    def close(self) -> None:
        """Remove the directory and its content. May be called again."""
        self._finalizer()


def remove_at_exit(directory: str, *paths: str) -> Callable[[], None]:
    """Remove `paths`, and `directory` if it is empty then, when this process has ended, even if it is killed.

    Returns:
        A function that removes them now. Call it once.
    """
    ends, alive = os.pipe()  # the kernel closes this end of it with the process
    command, nowhere = ["/bin/sh", "-c", _REMOVE_AT_END, directory, *paths], subprocess.DEVNULL
    # A new session, so that Ctrl-C does not reach it.
    subprocess.run(command, stdin=ends, stdout=nowhere, stderr=nowhere, start_new_session=True, check=True)
    os.close(ends)

    def remove() -> None:
        subprocess.run(["rm", "-rf", "--", *paths])
        with contextlib.suppress(OSError):  # it is gone, or other processes have files there
            os.rmdir(directory)
        with contextlib.suppress(BrokenPipeError):  # the remover was killed
            os.write(alive, b"\n")
        os.close(alive)

    return remove


def socket_parent_directory() -> str:
    """Return the directory in which to make a `SocketDirectory`. Raise UsageError if none is suitable."""
    place = next((each for each in (tempfile.gettempdir(), "/tmp", "/dev/shm") if _is_suitable(each)), None)
    if place is None:
        raise UsageError(
            f"The sockets of a program need a directory of at most {_LONGEST} characters that can be written to: "
            "TMPDIR, /tmp or /dev/shm. None of these is."
        )
    return place


def _is_suitable(place: str) -> bool:
    return len(os.fsencode(place)) <= _LONGEST and os.access(place, os.W_OK | os.X_OK)
