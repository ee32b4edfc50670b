"""`Transport`: how calls reach objects in other processes; one file for each way."""

from __future__ import annotations

from typing import Any

from rlframe.transport import courier
from rlframe.transport.base import CALL_TIMEOUT, Client, Derived, Future, Server, Transport

__all__ = ["CALL_TIMEOUT", "DEFAULT", "Client", "Derived", "Future", "Server", "Transport", "locate"]

# Where nobody says otherwise: nodes of Launchpad programs, addresses that users give.
DEFAULT: Transport = courier.CourierTransport()


def locate(target: Any) -> tuple[Transport, str] | None:
    """The transport and the address of a client that a library of its own made; None: it is an object."""
    address = courier.address_of(target)
    return None if address is None else (DEFAULT, address)
