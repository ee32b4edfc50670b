"""The engine of real processes on this machine, with nothing but the core installed.

Nodes call each other over sockets that only their user can reach: no port is opened. What is large crosses through
shared memory, as under every engine (parameters, replay, inference), or over the sockets without being copied twice.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any

from rlframe import extras
from rlframe.engines.base import Engine, EngineOptions, Watch, pick_free_port, warn_of_open_ports
from rlframe.engines.logs import NodeLogs
from rlframe.engines.supervision.node_main import node_processes
from rlframe.engines.supervision.placement import policies
from rlframe.engines.supervision.program import ProgramSupervisor
from rlframe.engines.supervision.served_node import ServedNode, run_node
from rlframe.handles import Remote
from rlframe.transport.sockets import SocketDirectory, SocketTransport

_TRANSPORT = SocketTransport()


class LocalEngine(Engine):
    """Runs each node as a process. The handle to a node is a `Remote`."""

    options = ("max_restarts", "hang_timeout", "grace_seconds", "accelerators")
    operator = "local"

    def __init__(self, options: EngineOptions) -> None:
        self._asked = options
        self._logs = NodeLogs(options.logs)
        self._resources = contextlib.ExitStack()
        self._sockets = self.own(SocketDirectory())
        self._reverb: dict[str, ReverbAt] = {}  # by group
        self._nodes: dict[str, list[ServedNode]] = collections.defaultdict(list)  # by group

    def add(self, group: str, constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> Remote:
        """See `Engine`."""
        address = f"{self._sockets.path}/{group}-{len(self._nodes[group])}"
        self._nodes[group].append(ServedNode(group, _TRANSPORT, address, constructor, args, kwargs))
        return self._handle(address, group)

    def add_reverb(self, group: str, tables: Any, path: str) -> ReverbAt:
        """See `Engine`: the one node that listens at a port, which is said before it starts."""
        extras.require("--replay reverb", "reverb")
        from rlframe.engines.reverb_server import ReverbServer

        port = pick_free_port()
        self.add(group, ReverbServer, tables, path, port, at_end=self._asked.grace_seconds / 2.0)
        self._reverb[group] = server = ReverbAt(f"localhost:{port}")
        return server

    @property
    def groups(self) -> dict[str, int]:
        """See `Engine`."""
        return {group: len(nodes) for group, nodes in self._nodes.items()}

    def own(self, resource: Any) -> Any:
        """See `Engine`."""
        self._resources.callback(resource.close)
        return resource

    def address_of(self, group: str) -> str:
        """See `Engine`; of a Reverb server "host:port"."""
        return self._reverb[group].address if group in self._reverb else self._nodes[group][0].address

    def handle_of(self, group: str) -> Remote:
        """See `Engine`."""
        return self._handle(self._nodes[group][0].address, group)

    def run(self, watch: Watch | None = None) -> int | None:
        """See `Engine`; as `rlframe.launch`."""
        options = self._asked
        with self._resources:
            pickled = {group: [node.pickled() for node in nodes] for group, nodes in self._nodes.items()}
            if self._reverb:
                listening = ", ".join(f"{group} (Reverb, {at.address})" for group, at in self._reverb.items())
                warn_of_open_ports(listening, options.output)
            with node_processes(run_node, pickled, policies(self.groups, options)) as processes:
                hang_timeout, grace = options.hang_timeout, options.grace_seconds
                return ProgramSupervisor(
                    processes, options.output, self._logs, hang_timeout=hang_timeout, watch=watch, grace=grace
                ).run()

    def _handle(self, address: str, group: str) -> Remote:
        return Remote([address], group, transport=_TRANSPORT)


class ReverbAt:
    """What becomes a `reverb.Client` in the process that it is sent to: this one need not import Reverb."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __reduce__(self) -> tuple[Any, ...]:
        return _reverb_client, (self.address,)


def _reverb_client(address: str) -> Any:
    import reverb

    return reverb.Client(address)
