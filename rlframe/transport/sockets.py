"""The transport for processes of one user on one machine: Unix-domain sockets. Addresses are paths.

Received data is unpickled, so other users must not connect. The sockets are in a directory of mode 0700
(`SocketDirectory`), and both processes check the peer's user (SO_PEERCRED). No network port is opened.

Each pending call has its own connection, which is reused after the answer. So an answer needs no call number, and the
calling thread itself reads the answer. benchmarks/calls.py compares this transport with other libraries.
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
from rlframe.transport import base
from rlframe.transport.base import CALL_TIMEOUT, MappedFuture

_BACKLOG = 1024  # maximum number of connections that wait until the server accepts them
_SEND_TIMEOUT = 60  # maximum seconds until a client has read an answer
_ACCEPT_PAUSE = 0.1  # seconds before the next `accept` after a failure due to too many open files
_MAX_IDLE = 16  # maximum number of idle connections that a client keeps for later calls
_MAX_PARENT_LENGTH = 50  # maximum bytes of the parent directory's path; the path of a socket has at most 107

# A shell script that waits until this process ends, even after SIGKILL, and then removes the sockets. To wait, it
# reads from a pipe of this process. If it reads a line, it exits without removing them. The script runs in the
# background and has no parent process, because Ray kills the children of its actors.
_REMOVE_AT_END = """exec 3<&0
{ read _ <&3 || { rm -rf -- "$@"; rmdir -- "$0"; }; } &"""


@dataclasses.dataclass(frozen=True)
class SocketTransport:
    """See `Transport`. A server without an address creates its own directory."""

    def connect(self, address: str) -> SocketClient:
        """See `Transport`."""
        return SocketClient(address)

    def is_reachable(self, address: str) -> bool:
        """See `Transport`."""
        try:
            _open_connection(address, 1.0).close()
        except (OSError, UnavailableError):
            return False
        return True

    def serve(self, methods: Mapping[str, Callable[..., Any]], address: str | None = None) -> SocketServer:
        """See `Transport`."""
        return SocketServer(methods, address)

    def check(self, by: str) -> None:
        """See `Transport`. This transport needs no package."""


class SocketClient:
    """See `rlframe.transport.Client`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._idle: list[socket.socket] = []

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """See `Client`."""
        return unpack_answer(self._send(base.pack((method, args, kwargs))).result())

    def submit(self, method: str, /, *args: Any) -> MappedFuture[SocketFuture]:
        """See `Client`."""
        try:
            sent = self._send(base.pack((method, args, {})))
        except UnavailableError as error:
            sent = SocketFuture(None, self._idle, error)
        return MappedFuture(sent, lambda future: unpack_answer(future.result()))

    def exchange(self, request: base.Parts) -> base.Parts:
        """Return the packed answer to a packed call (method, args, kwargs). Relays use this method."""
        return self._send(request).result()

    def _send(self, parts: base.Parts) -> SocketFuture:
        while True:
            try:
                connection, is_new = self._idle.pop(), False
            except IndexError:
                connection, is_new = self._connect(), True
            try:
                connection.settimeout(CALL_TIMEOUT)
                base.send(connection, parts)
            except OSError as error:
                connection.close()
                if is_new or isinstance(error, TimeoutError):
                    raise _unavailable(error) from None
                continue  # The connection is closed, because the server has restarted since the last call.
            return SocketFuture(connection, self._idle)

    def _connect(self) -> socket.socket:
        try:
            return _open_connection(self._address, CALL_TIMEOUT)
        except OSError as error:
            raise _unavailable(error) from None


class SocketFuture:
    """See `rlframe.transport.Future`. The result is the packed answer, which `unpack_answer` unpacks.

    Args:
        connection: connection of the call. None if the call was not sent.
        idle: list to which the connection is added after the answer.
        error: the error that prevented the sending of the call. None if the call was sent.
    """

    def __init__(
        self, connection: socket.socket | None, idle: list[socket.socket], error: Exception | None = None
    ) -> None:
        self._connection, self._idle = connection, idle
        self._deadline = time.monotonic() + CALL_TIMEOUT
        self._lock = threading.Lock()  # locked by the thread that reads the answer
        self._parts: base.Parts = []
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
        except (OSError, ValueError):  # another thread has already read the answer
            return True

    def result(self) -> base.Parts:
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
            self._parts = base.receive(connection)
        except (OSError, EOFError) as error:
            connection.close()
            self._error = _unavailable(error)
        else:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
            else:
                connection.close()
        self._connection = None


class SocketServer:
    """See `rlframe.transport.Server`. Each connection has a thread, which executes one call at a time.

    Args:
        methods: the methods, by name.
        path: path of the socket. None means a socket in a new directory.
        address: address that clients use. None means the path.
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
        # Create the socket under another name. The rename, after `listen`, also replaces the socket of a killed server.
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
                if not self._stopped:  # The process has too many open files. Wait until it has closed some.
                    time.sleep(_ACCEPT_PAUSE)
                continue
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="rlframe calls", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        seconds = struct.pack("@ll", _SEND_TIMEOUT, 0)
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
        request = base.receive(connection)
        try:
            method, args, kwargs = base.unpack(request)
            if method in self._methods:
                answer = base.pack((self._methods[method](*args, **kwargs),))
            else:
                answer = base.pack((None, NoMethodError.__name__, f"{self.address} has no method {method}."))
        except Exception as error:
            answer = base.pack((None, *_error_parts(error)))
        base.send(connection, answer)


def _open_connection(address: str, timeout: float) -> socket.socket:
    """Return a connection. Raise OSError if no server listens, and UnavailableError if it belongs to another user."""
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
    """Raise UnavailableError if the peer process belongs to another user."""
    # On other systems than Linux, only the mode of the directory protects the sockets.
    if not hasattr(socket, "SO_PEERCRED"):
        return
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("3i", raw)
    if uid != os.geteuid():
        raise UnavailableError(f"the process at the other end belongs to the user {uid}")


def _unavailable(error: Exception) -> UnavailableError:
    if isinstance(error, (TimeoutError, BlockingIOError)):
        return UnavailableError(f"no answer within {CALL_TIMEOUT:g} s")
    return UnavailableError(getattr(error, "strerror", None) or str(error))


def _error_parts(error: Exception) -> tuple[str, str, str]:
    """Return an error as (name of a class in `rlframe.errors`, message, traceback), to be sent as the answer."""
    names = [each.__name__ for each in type(error).__mro__ if each.__module__ == errors.__name__]
    is_ours = names and not isinstance(error, RemoteError)  # A RemoteError was raised in another node.
    return names[0] if is_ours else RemoteError.__name__, str(error), traceback.format_exc()


def unpack_answer(parts: base.Parts) -> Any:
    """Return the value in a packed answer, or raise the method's error, as `Client.call` does."""
    return _value_or_error(*base.unpack(parts))


def _value_or_error(value: Any, name: str | None = None, message: str = "", text: str = "") -> Any:
    if name is None:
        return value
    kind: type[RlframeError] = getattr(errors, name)
    if issubclass(kind, (RemoteError, UnavailableError)):
        raise kind(text or message)
    raise errors.error_from_message(kind, message) from RemoteError(text)


class SocketDirectory:
    """A directory for a program's sockets. Only the program's user can enter the directory.

    The directory is in TMPDIR, or in /tmp if the paths of sockets would be too long. The directory is removed by
    `close`, or when this process ends, even if the process is killed.

    Attributes:
        path: path of the directory.
    """

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="rlframe-", dir=socket_parent_directory())  # has mode 0700
        self._finalizer = weakref.finalize(self, remove_at_exit(self.path, self.path))

    def close(self) -> None:
        """Remove the directory and its contents. A second call does nothing."""
        self._finalizer()


def remove_at_exit(directory: str, *paths: str) -> Callable[[], None]:
    """Remove paths when this process ends, even if it is killed. Then remove the directory if it is empty.

    Args:
        directory: the directory that contains the paths.
        *paths: the paths to remove.

    Returns:
        A function that removes the paths now. Call the function only once.
    """
    ends, alive = os.pipe()  # the kernel closes `alive` when this process ends
    command, null_device = ["/bin/sh", "-c", _REMOVE_AT_END, directory, *paths], subprocess.DEVNULL
    # Start the script in a new session, so that Ctrl-C does not end it.
    subprocess.run(command, stdin=ends, stdout=null_device, stderr=null_device, start_new_session=True, check=True)
    os.close(ends)

    def remove() -> None:
        subprocess.run(["rm", "-rf", "--", *paths])
        with contextlib.suppress(OSError):  # The directory does not exist, or it contains files of other processes.
            os.rmdir(directory)
        with contextlib.suppress(BrokenPipeError):  # The shell script was killed.
            os.write(alive, b"\n")
        os.close(alive)

    return remove


def socket_parent_directory() -> str:
    """Return the parent directory for a `SocketDirectory`. Raise UsageError if no directory is suitable."""
    directory = next((each for each in (tempfile.gettempdir(), "/tmp", "/dev/shm") if _is_suitable(each)), None)
    if directory is None:
        raise UsageError(
            f"The sockets of a program need a writable directory whose path has at most {_MAX_PARENT_LENGTH} bytes. "
            "TMPDIR, /tmp and /dev/shm are not suitable: set TMPDIR to another directory."
        )
    return directory


def _is_suitable(directory: str) -> bool:
    return len(os.fsencode(directory)) <= _MAX_PARENT_LENGTH and os.access(directory, os.W_OK | os.X_OK)
