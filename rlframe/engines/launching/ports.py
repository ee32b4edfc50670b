"""Ports of programs whose nodes listen on all interfaces: free ones, and what is said of them."""

from __future__ import annotations

import socket

OPEN = (
    "{}, and what these start, listen on all interfaces of this machine, without authentication: whoever reaches such "
    "a port can run code as you. Close them (firewall, network namespace), or run where nobody else reaches this "
    "machine: see SECURITY.md."
)


def pick_free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]
