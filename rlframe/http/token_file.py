"""The token of a service, which is needed unless the service is on loopback or was started with --no-token."""

from __future__ import annotations

import ipaddress
import pathlib

from rlframe.errors import UsageError


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


def check_guarded(host: str, token_file: str | None, can: str, no_token: bool | None = None) -> None:
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


def no_token_means(can: str) -> str:
    """Return the warning at the start of a service for which no token is needed."""
    return (
        f"rlframe: --no-token: whoever reaches this service, from whichever machine, can {can}. Nothing is encrypted: "
        "let only machines that you trust reach it."
    )
