"""The engine `local`: processes on this machine, without extra packages.

Nodes call each other over Unix sockets that only the user who started the program can open. No port is opened.
Parameters, replay data and inference data use shared memory, as under every engine. Large arrays in other calls are
sent over the socket as raw bytes, not pickled.
"""

from __future__ import annotations

from typing import Any

from rlframe import extras
from rlframe.engines.base import EngineOptions, Watch, pick_free_port, warn_about_open_ports
from rlframe.engines.group_rules import rules_by_group
from rlframe.engines.served_engine import ServedEngine
from rlframe.engines.supervision.node_main import run_served_node
from rlframe.engines.supervision.nodes import program_processes
from rlframe.transport.sockets import SocketDirectory, SocketTransport


class LocalEngine(ServedEngine):
    """Runs each node as a process."""

    options = ("max_restarts", "hang_timeout", "grace_seconds", "accelerators")
    operator = "local"
    transport = SocketTransport()

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._sockets = self.own(SocketDirectory())
        self._reverb: dict[str, ReverbAddress] = {}  # by group

    def add_reverb(self, group: str, tables: Any, path: str) -> ReverbAddress:
        """See `RunsReverb`. The Reverb server listens on a port, so `run` prints a warning."""
        extras.require("--replay reverb", "reverb")
        from rlframe.engines.reverb_server import ReverbServer

        port = pick_free_port()
        self.add(group, ReverbServer, tables, path, port, at_end=self._options.grace_seconds / 2.0)
        self._reverb[group] = server = ReverbAddress(f"localhost:{port}")
        return server

    def address_of(self, group: str) -> str:
        """See `Engine`. The address of a Reverb server is "host:port"."""
        return self._reverb[group].address if group in self._reverb else super().address_of(group)

    def run(self, watch: Watch | None = None) -> int | None:
        """See `Engine` and `launchpad.launch`."""
        with self._resources:
            pickled = {group: [node.pickled() for node in nodes] for group, nodes in self._nodes.items()}
            rules = rules_by_group(self.groups, self._options.max_restarts, self._options.accelerators)
            processes = program_processes(run_served_node, pickled, rules)
            if self._reverb:
                listening = ", ".join(f"{group} (Reverb, {at.address})" for group, at in self._reverb.items())
                warn_about_open_ports(listening, self._options.output)
            return self._supervisor(processes, watch).run()

    def _address(self, group: str, index: int) -> str:
        return f"{self._sockets.path}/{group}-{index}"


class ReverbAddress:
    """A handle to a Reverb server. Unpickling it in a node returns a `reverb.Client`, so only nodes import Reverb."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __reduce__(self) -> tuple[Any, ...]:
        return _reverb_client, (self.address,)


def _reverb_client(address: str) -> Any:
    import reverb

    return reverb.Client(address)
