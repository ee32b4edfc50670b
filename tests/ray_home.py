"""Create the HOME directory for Ray, which all tests of a process share."""

from __future__ import annotations

import functools
import tempfile


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rlframe-test-")


def ray_home() -> str:
    """Return a HOME directory for Ray. It is deleted when the process ends.

    All tests of a process must use the same HOME, because Ray stores its token there and reads it only once.
    """
    return _directory().name
