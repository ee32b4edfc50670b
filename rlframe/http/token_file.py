"""The secret of a service."""

from __future__ import annotations

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
