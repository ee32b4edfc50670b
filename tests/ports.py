"""Find free ports for tests."""

from __future__ import annotations

import itertools
import os
import random
import socket

# The ports are below the system's ephemeral ports, and each pytest-xdist worker has its own range. Otherwise two gRPC
# servers could share a port without an error, or another process could listen at a port that a test expects to be free.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 20
_START = random.SystemRandom().randrange(1000)
_ports = (10_000 + 1000 * _WORKER + i % 1000 for i in itertools.count(_START))


def free_port(count: int = 1) -> int:
    """Find `count` consecutive free ports, and return the first of them. No two calls return the same port."""
    found: list[int] = []
    while len(found) < count:
        port = next(_ports)
        if not _is_free(port):
            found = []
        elif not found or port == found[-1] + 1:
            found.append(port)
        else:
            found = [port]
    return found[0]


def free_address() -> str:
    """Return an address on this machine with a free port."""
    return f"localhost:{free_port()}"


def _is_free(port: int) -> bool:
    try:
        for family in (socket.AF_INET, socket.AF_INET6) if socket.has_dualstack_ipv6() else (socket.AF_INET,):
            socket.create_server(("", port), family=family).close()
    except OSError:
        return False
    return True
