"""Ports at which nobody listens."""

from __future__ import annotations

import itertools
import os
import random
import socket

# Below those that the system gives to whoever asks for any port, and other ones for each worker of pytest-xdist: two
# gRPC servers may share a port without noticing, and at a "dead" address nobody else may begin to listen.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 20
_START = random.SystemRandom().randrange(1000)
_ports = (10_000 + 1000 * _WORKER + i % 1000 for i in itertools.count(_START))


def free_port(count: int = 1) -> int:
    """The first of `count` ports, one after the other, at which nobody listens. No port is given again soon."""
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
    """Of a port of this machine."""
    return f"localhost:{free_port()}"


def _is_free(port: int) -> bool:
    try:
        for family in (socket.AF_INET, socket.AF_INET6) if socket.has_dualstack_ipv6() else (socket.AF_INET,):
            socket.create_server(("", port), family=family).close()
    except OSError:
        return False
    return True
