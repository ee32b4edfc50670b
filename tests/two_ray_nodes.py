"""Simulate two Ray nodes, without Ray, to test the transport of the ray engine.

The servers are on one node, and the clients are on the other node. A relay connects the nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlframe.transport.base import Parts
from rlframe.transport.ray import RaySockets, RayTransport, use_sockets
from rlframe.transport.sockets import SocketClient, SocketServer, SocketTransport


@dataclasses.dataclass(frozen=True)
class TwoRayNodes(RayTransport):
    """A transport whose servers are on the Ray node `there` and whose clients are on the Ray node `here`."""

    there: RaySockets
    here: RaySockets

    def serve(self, methods: Mapping[str, Callable[..., Any]], address: str | None = None) -> SocketServer:
        """See `Transport`."""
        use_sockets(self.there)
        try:
            return super().serve(methods, address)
        finally:
            use_sockets(self.here)


@contextlib.contextmanager
def two_ray_nodes(directory: pathlib.Path) -> Iterator[TwoRayNodes]:
    """Create both Ray nodes. Their sockets are in `directory`, which must have a short path."""
    there, here = RaySockets(f"{directory}/there", "relay"), RaySockets(f"{directory}/here", "relay")

    def relay(node: str, packed: Parts) -> Parts:
        return SocketClient(there.socket(node)).exchange(packed)

    def reaches(node: str) -> bool:
        return SocketTransport().is_reachable(there.socket(node))

    path = f"{here.directory}/{here.relay}"
    with contextlib.ExitStack() as opened:
        opened.callback(there.open())
        opened.callback(here.open(path))
        server = SocketServer({"relay": relay, "reaches": reaches, "versions": lambda *_: None}, path)
        opened.callback(server.stop)
        use_sockets(here)
        opened.callback(use_sockets, None)
        yield TwoRayNodes(there, here)
