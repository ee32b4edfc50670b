"""The options that the services share: where one listens, and who may call it. They import no web framework."""

from __future__ import annotations

import dataclasses
import ipaddress
import pathlib
import sys
from typing import ClassVar

from rlframe.errors import UsageError, check_at_least


@dataclasses.dataclass(frozen=True)
class ServiceConfig:
    """Host, guards and limits of a service, which adds its port. `can`: the actions that a client can take."""

    can: ClassVar[str] = "call it"

    host: str = "127.0.0.1"  # address to listen at; 0.0.0.0 for all networks, which needs a token_file or no_token
    token_file: str | None = None  # file with the bearer token that every request has to carry
    no_token: bool = False  # answer other machines without a token: whoever reaches the service can do all it offers
    # names that the service is reached under, beside localhost and IP addresses; only without a token
    allowed_hosts: tuple[str, ...] = ()
    max_body_mb: int = 64  # megabytes of one request, decompressed
    max_connections: int = 1024  # at the same time; more are refused

    def __post_init__(self) -> None:
        check_access_is_restricted(self.host, self.token_file, self.can, self.no_token)
        check_at_least(self, 1, "max_body_mb", "max_connections")


def read_token(file: str | None) -> str | None:
    """Read the bearer token in a file. Raise `UsageError` if the file cannot be read or is empty."""
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
    """Return True if only this machine reaches a service that listens at this address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def check_access_is_restricted(host: str, token_file: str | None, can: str, no_token: bool | None = None) -> None:
    """Raise `UsageError` if other machines would need no token, and --no-token was not given.

    Args:
        host: that the service listens at.
        token_file: with its token; None: it has none.
        can: the actions that a client can take.
        no_token: whether --no-token was given; None: the service has no such option.
    """
    if token_file is not None:
        if no_token:
            raise UsageError("A token file and --no-token contradict each other: leave one of them out.")
    elif not no_token and not is_loopback(host):
        way_out = "" if no_token is None else "say by --no-token that they all may, "
        raise UsageError(
            f"{host} can be reached from other machines, and whoever reaches this service can {can}. Give it a "
            f"--token-file, {way_out}or listen at 127.0.0.1."
        )


def warn_no_token(no_token: bool, can: str) -> None:
    """Print the warning at the start of a service for which --no-token was given."""
    if no_token:
        print(
            f"rlframe: --no-token: whoever reaches this service, from any machine, can {can}. Nothing is "
            "encrypted: let only machines that you trust reach it.",
            file=sys.stderr,
            flush=True,
        )
