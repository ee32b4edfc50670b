"""The secret of a service, and where it needs none."""

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
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
