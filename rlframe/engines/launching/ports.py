"""Ports of programs whose nodes listen on all interfaces: free ones, and what is said of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from rlframe.errors import UsageError

OPEN = (
    "{}, and what these start, listen on all interfaces of this machine, without authentication: whoever reaches such "
    "a port can run code as you. Close them (firewall, network namespace), or run where nobody else reaches this "
    "machine: see SECURITY.md."
)


def check_free(ports: Mapping[str, int]) -> None:
    """Raises UsageError where a port, by what listens at it, cannot be listened at on all interfaces.

    gRPC would not notice: two of its servers may share a port.
    """
    for name, port in ports.items():
        if not 0 < port < 2**16:
            raise UsageError(f"The {name}'s port would be {port}; ports are 1 to 65535.")
        for family in (socket.AF_INET, socket.AF_INET6) if socket.has_dualstack_ipv6() else (socket.AF_INET,):
            try:
                socket.create_server(("", port), family=family).close()
            except OSError as error:
                reason = os.strerror(error.errno) if error.errno else str(error)
                raise UsageError(
                    f"The {name} cannot listen at port {port}: {reason}. Choose another: {len(ports)} from --listen "
                    "PORT on, or that of --replay-at, must be free."
                ) from error


def pick_free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]
