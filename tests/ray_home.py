"""A home for the Rays that tests start in this process."""

from __future__ import annotations

import functools
import tempfile


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rlframe-test-")


def ray_home() -> str:
    """HOME for Ray, the same for all: it keeps a token there, and the process goes on with the first that it has read.

    The directory goes with the process.
    """
    return _directory().name
