"""Paths that are not UTF-8, for libraries that need UTF-8. Python keeps other bytes in strings as surrogates."""

from __future__ import annotations

import os


class NativePath:
    """A path of an existing directory for C++ libraries of this process, which take paths as UTF-8.

    A path that is not ASCII is replaced by that of an open descriptor, until `close`: its bytes need not be UTF-8, and
    Python may encode paths in another way.

    Attributes:
        path: of the directory.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path, self._descriptor = os.fspath(directory), -1
        if not self.path.isascii():
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            self.path = f"/proc/self/fd/{self._descriptor}"

    def close(self) -> None:
        """Close the descriptor. Calling it twice does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def printable(text: str) -> str:
    """Return a text with its bytes that are not UTF-8 as escapes: `a\\xff`."""
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")
