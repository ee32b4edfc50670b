"""The transport for nodes on a Ray cluster. Addresses are names of nodes, such as `actor/1`, on any machine.

A call to a node on the same Ray node uses a socket. A call to a node on another Ray node has three steps:

1. The caller sends the packed call over a socket to the caller's relay.
2. The relay forwards the packed call to the other Ray node, as a call of a Ray actor.
3. That actor sends the packed call over a socket to the node.

The relay is in `rlframe.engines.ray_nodes.host`, so this file and the nodes do not import Ray.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from rlframe.errors import UsageError
from rlframe.transport import base
from rlframe.transport.base import Client, Future, MappedFuture
from rlframe.transport.sockets import (
    SocketClient,
    SocketServer,
    SocketTransport,
    remove_at_exit,
    socket_parent_directory,
    unpack_answer,
)

SOCKETS_VARIABLE = "RLFRAME_RAY_SOCKETS"  # environment variable of each node, with the value "DIRECTORY:RELAY"

_SOCKETS = SocketTransport()
# methods of `PackedSource` and of `ParamStore` in the elastic topology
_VERSION_METHODS = ("get_packed", "wait_for_version")
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class RaySockets:
    """The sockets of a program's nodes on one Ray node, and the relay that a process on this Ray node uses.

    Attributes:
        directory: directory that contains the sockets of all nodes on this Ray node. Only this user can enter it.
        relay: name of the relay's socket in the directory.
    """

    directory: str
    relay: str

    @staticmethod
    def path(token: str, ray_node: str) -> str:
        """Return the directory for a Ray node's sockets. Each run and each Ray node has a separate directory."""
        return f"{socket_parent_directory()}/rlframe-{token}-{ray_node[:8]}"

    def socket(self, node: str) -> str:
        """Return the path of a node's socket. The socket exists only if the node is on this Ray node."""
        return f"{self.directory}/{node.replace('/', '-')}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables for a process that uses these sockets."""
        return {SOCKETS_VARIABLE: f"{self.directory}:{self.relay}"}

    def open(self, *paths: str) -> Callable[[], None]:
        """Create the directory if it does not exist.

        Args:
            *paths: paths of sockets to remove when this process ends, even after SIGKILL.

        Returns:
            A function that removes the sockets now. If no sockets remain, it removes the directory too.
        """
        pathlib.Path(self.directory).mkdir(mode=0o700, exist_ok=True)
        about = os.stat(self.directory, follow_symlinks=False)
        if about.st_uid != os.geteuid() or about.st_mode & 0o77:
            raise UsageError(f"{self.directory} belongs to another user or is open to other users: remove it.")
        return remove_at_exit(self.directory, *paths)


_current: RaySockets | None = None


def use_sockets(ray_sockets: RaySockets | None) -> None:
    """Set the sockets that this process uses. In a node, the environment variable SOCKETS_VARIABLE sets them."""
    global _current
    _current = ray_sockets
    _client.cache_clear()


def current_sockets() -> RaySockets:
    """Return the sockets that this process uses. Raise UsageError if the process is not part of a program on Ray."""
    if _current is not None:
        return _current
    directory, _, relay = os.environ.get(SOCKETS_VARIABLE, "").partition(":")
    if not relay:
        raise UsageError(
            "Handles to nodes on Ray work only in processes of the same program. This process is not part of a program."
        )
    return RaySockets(directory, relay)


def call_relay(method: str, *args: Any) -> Any:
    """Call a method of this process's relay. Raises the same errors as `Client.call`."""
    return _relay().call(method, *args)


@dataclasses.dataclass(frozen=True)
class RayTransport:
    """See `Transport`. Addresses are the names of nodes, such as `learner` and `actor/1`."""

    def connect(self, address: str) -> Client:
        """See `Transport`."""
        return _RayClient(address)

    def is_reachable(self, address: str) -> bool:
        """See `Transport`."""
        path = current_sockets().socket(address)
        if os.path.exists(path):
            return _SOCKETS.is_reachable(path)
        try:
            return bool(call_relay("reaches", address))
        except Exception:  # The relay has exited, so this node will also be stopped soon.
            return False

    def serve(self, methods: Mapping[str, Callable[..., Any]], address: str | None = None) -> SocketServer:
        """See `Transport`. The relay and the nodes on this Ray node can connect to the server's socket."""
        name = address or f"node-{os.getpid()}-{next(_numbers)}"
        return SocketServer(methods, current_sockets().socket(name), name)

    def check(self, by: str) -> None:
        """See `Transport`. This transport needs no package."""


class _RayClient:
    """See `Client`. Each call looks up the node again, because a node can restart on another Ray node."""

    def __init__(self, address: str) -> None:
        self._address, self._path = address, current_sockets().socket(address)
        self._local = SocketClient(self._path)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        if os.path.exists(self._path):
            return self._local.call(method, *args, **kwargs)
        if method in _VERSION_METHODS and not kwargs:  # the relay fetches each version once for its Ray node
            answer = _relay().call("versions", self._address, method, *args)
            if answer is not None:
                return unpack_answer(answer) if isinstance(answer, list) else answer
        return unpack_answer(_relay().call("relay", self._address, base.pack((method, args, kwargs))))

    def submit(self, method: str, /, *args: Any) -> Future:
        if os.path.exists(self._path):
            return self._local.submit(method, *args)
        sent = _relay().submit("relay", self._address, base.pack((method, args, {})))
        return MappedFuture(sent, lambda future: unpack_answer(future.result()))


def _relay() -> SocketClient:
    ray_sockets = current_sockets()
    return _client(f"{ray_sockets.directory}/{ray_sockets.relay}")


_client = functools.lru_cache(maxsize=1)(SocketClient)
