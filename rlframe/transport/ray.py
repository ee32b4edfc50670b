"""Calls between the nodes of a program on a Ray cluster. Addresses are the names of nodes, wherever those are.

A node that is on the same Ray node is called over a socket. To one that is on another, a call goes over a socket to
the relay beside the caller, from there as a call of a Ray actor, packed as it is, and over a socket again.
(`rlframe.engines.ray_nodes.host` is the relay: nothing here imports Ray, and no node need.)
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
from rlframe.transport import messages
from rlframe.transport.base import Client, Future, MappedFuture
from rlframe.transport.sockets import (
    SocketClient,
    SocketServer,
    SocketTransport,
    remove_at_exit,
    socket_parent_directory,
    unpack_answer,
)

SOCKETS_VARIABLE = "RLFRAME_RAY_STATION"  # "DIRECTORY:RELAY", for the process of a node

_SOCKETS = SocketTransport()
_VERSIONS = ("get_packed", "wait_for_version")  # of a `PackedSource`, or of elastic's `ParamStore`
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class RaySockets:
    """Where a process that calls nodes is: on which Ray node, and who relays its calls.

    Attributes:
        directory: of the sockets of the nodes that are on this Ray node, which only this user can enter.
        relay: name of the relay's socket in there.
    """

    directory: str
    relay: str

    @staticmethod
    def path(token: str, ray_node: str) -> str:
        """Return the directory of a run's sockets on a Ray node; others have others, even on the same machine."""
        return f"{socket_parent_directory()}/rlframe-{token}-{ray_node[:8]}"

    def socket(self, node: str) -> str:
        """Return the path of a node's socket, if it is on this Ray node."""
        return f"{self.directory}/{node.replace('/', '-')}"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables by which a process finds it."""
        return {SOCKETS_VARIABLE: f"{self.directory}:{self.relay}"}

    def open(self, *paths: str) -> Callable[[], None]:
        """Make the directory, unless another process of the run has.

        Args:
            *paths: of the sockets. They are removed when this process has ended, even if it is killed.

        Returns:
            What removes them now; the last one removes the directory.
        """
        pathlib.Path(self.directory).mkdir(mode=0o700, exist_ok=True)
        about = os.stat(self.directory, follow_symlinks=False)
        if about.st_uid != os.geteuid() or about.st_mode & 0o77:
            raise UsageError(f"{self.directory} is not this user's alone: remove it.")
        return remove_at_exit(self.directory, *paths)


_joined: RaySockets | None = None


def join(ray_sockets: RaySockets | None) -> None:
    """Set the station of this process, if it is no node. (A node has it in its environment.)"""
    global _joined
    _joined = ray_sockets
    _client.cache_clear()


def here() -> RaySockets:
    """Return the station of this process. Raise UsageError if it is part of no program on Ray."""
    if _joined is not None:
        return _joined
    directory, _, relay = os.environ.get(SOCKETS_VARIABLE, "").partition(":")
    if not relay:
        raise UsageError("This process is no node of a program on Ray: the handles of its nodes mean nothing here.")
    return RaySockets(directory, relay)


def call_relay(method: str, *args: Any) -> Any:
    """Call this process's relay. Raise as `Client.call`."""
    return _relay().call(method, *args)


@dataclasses.dataclass(frozen=True)
class RayTransport:
    """See `Transport`. Nodes serve at their names: `learner`, `actor/1`."""

    def connect(self, address: str) -> Client:
        """See `Transport`."""
        return _RayClient(address)

    def is_reachable(self, address: str) -> bool:
        """See `Transport`."""
        path = here().socket(address)
        if os.path.exists(path):
            return _SOCKETS.is_reachable(path)
        try:
            return bool(call_relay("reaches", address))
        except Exception:  # the relay is gone, and with it this node soon
            return False

    def serve(self, methods: Mapping[str, Callable[..., Any]], address: str | None = None) -> SocketServer:
        """See `Transport`: a socket for the relay, and for the nodes on this Ray node."""
        name = address or f"node-{os.getpid()}-{next(_numbers)}"
        return SocketServer(methods, here().socket(name), name)

    def check(self, by: str) -> None:
        """See `Transport`: it needs nothing of its own."""


class _RayClient:
    """See `Client`. Where the node is, is asked with every call: it may come back elsewhere."""

    def __init__(self, address: str) -> None:
        self._address, self._path = address, here().socket(address)
        self._beside = SocketClient(self._path)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        if os.path.exists(self._path):
            return self._beside.call(method, *args, **kwargs)
        if method in _VERSIONS and not kwargs:  # the relay may have them: they are fetched once for a Ray node
            found = _relay().call("versions", self._address, method, *args)
            if found is not None:
                return unpack_answer(found) if isinstance(found, list) else found
        return unpack_answer(_relay().call("relay", self._address, messages.pack((method, args, kwargs))))

    def submit(self, method: str, /, *args: Any) -> Future:
        if os.path.exists(self._path):
            return self._beside.submit(method, *args)
        sent = _relay().submit("relay", self._address, messages.pack((method, args, {})))
        return MappedFuture(sent, lambda future: unpack_answer(future.result()))


def _relay() -> SocketClient:
    ray_sockets = here()
    return _client(f"{ray_sockets.directory}/{ray_sockets.relay}")


_client = functools.lru_cache(maxsize=1)(SocketClient)
