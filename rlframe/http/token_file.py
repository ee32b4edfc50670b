"""The secret of a service, and where it needs none: at loopback, or where its operator says so."""

from __future__ import annotations

import ipaddress
import pathlib

from rlframe.errors import UsageError


def read_token(file: str | None) -> str | None:
    """The bearer token in a file. Raises `UsageError` where the file cannot be read or is empty."""
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
    """Whether a service that listens at this address is reached from this machine only."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def check_guarded(host: str, token_file: str | None, can: str, no_token: bool | None = None) -> None:
    """Raise `UsageError` where others than this machine's would need no token, and the operator has not said so.

    Args:
        host: that the service listens at.
        token_file: with its token; None: it has none.
        can: what whoever reaches the service can do.
        no_token: whether the operator says that none is needed; None: that cannot be said of this service.
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
