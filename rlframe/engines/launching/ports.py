"""Ports that are known before a program is launched."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping
from typing import Any

from rlframe.errors import UsageError


@dataclasses.dataclass(frozen=True)
class KnownAddress:
    """What a `launchpad.Address` can be bound to (an `AbstractAddressBuilder`, by its method)."""

    address: str  # "host:port"

    def build(self) -> str:
        """Returns the address."""
        return self.address


def pick_free() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def check_free(ports: Mapping[str, int]) -> None:
    """Raises UsageError where a port, by what listens at it, cannot be listened at on all interfaces.

    gRPC would not notice: two of its servers may share a port.
    """
    for name, port in ports.items():
        if not 0 < port < 2**16:
            raise UsageError(f"--listen: the {name}'s port would be {port}; ports are 1 to 65535.")
        for family in (socket.AF_INET, socket.AF_INET6) if socket.has_dualstack_ipv6() else (socket.AF_INET,):
            try:
                socket.create_server(("", port), family=family).close()
            except OSError as error:
                reason = os.strerror(error.errno) if error.errno else str(error)
                raise UsageError(
                    f"--listen: the {name} cannot listen at port {port}: {reason}. Choose another: of --listen PORT, "
                    f"{len(ports)} ports from PORT on must be free."
                ) from error


def open_ports(program: Any) -> str:
    """The nodes of a program whose addresses are bound, with their ports: "learner (port 1), actor (ports 2, 3)".

    Empty where no node listens.
    """
    listed = []
    for label, group in program.groups.items():
        ports = [address.resolve().rpartition(":")[2] for node in group for address in node.addresses]
        if ports:
            listed.append(f"{label} (port{'s' * (len(ports) > 1)} {', '.join(ports)})")
    return ", ".join(listed)
