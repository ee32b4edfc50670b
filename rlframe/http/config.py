"""Options that all services have: the listen address, and access control. This module imports no web framework."""

from __future__ import annotations

import dataclasses
import ipaddress
import pathlib
import sys
from typing import ClassVar

from rlframe.errors import UsageError, check_at_least


@dataclasses.dataclass(frozen=True)
class ServiceConfig:
    """Address, access control and limits of a service. Subclasses add the port and describe client actions in `can`."""

    can: ClassVar[str] = "call it"

    host: str = "127.0.0.1"  # address to listen at; 0.0.0.0 means all networks and needs token_file or no_token
    token_file: str | None = None  # file with the bearer token that every request must carry
    no_token: bool = False  # answer other machines without a token; every client that reaches the service may use it
    # host names of the service, in addition to localhost and IP addresses; checked only without a token
    allowed_hosts: tuple[str, ...] = ()
    max_body_mb: int = 64  # maximum megabytes of a request body, decompressed
    max_connections: int = 1024  # maximum number of simultaneous connections; further connections are refused

    def __post_init__(self) -> None:
        check_access_is_restricted(self.host, self.token_file, self.can, self.no_token)
        check_at_least(self, 1, "max_body_mb", "max_connections")


def read_token(file: str | None) -> str | None:
    """Read the bearer token from a file. Raise `UsageError` if the file cannot be read or is empty."""
    if file is None:
        return None
    try:
        token = pathlib.Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The token file {file} cannot be read: {error}.") from error
    if not token:
        raise UsageError(f"The token file {file} is empty. Put a secret into it, on one line.")
    return token


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a service that listens at this address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def check_access_is_restricted(host: str, token_file: str | None, can: str, no_token: bool | None = None) -> None:
    """Raise `UsageError` if other machines can call the service without a token, and --no-token is not set.

    Args:
        host: Address on which the service listens.
        token_file: File with the service's token. None means that the service has no token.
        can: Text for the message that describes what a client can do.
        no_token: Whether --no-token was given. None means that the service does not have this option.
    """
    if token_file is not None:
        if no_token:
            raise UsageError("A token file and --no-token contradict each other. Remove one of them.")
    elif not no_token and not is_loopback(host):
        way_out = "" if no_token is None else "allow all clients with --no-token, "
        raise UsageError(
            f"Other machines can reach {host}, and every client that reaches this service can {can}. Give a "
            f"--token-file, {way_out}or listen at 127.0.0.1."
        )


def warn_no_token(no_token: bool, can: str) -> None:
    """Print a warning at the start of a service that runs with --no-token."""
    if no_token:
        print(
            f"rlframe: --no-token: every client that reaches this service, from any machine, can {can}. Nothing is "
            "encrypted. Make sure that only machines that you trust can reach the service.",
            file=sys.stderr,
            flush=True,
        )
