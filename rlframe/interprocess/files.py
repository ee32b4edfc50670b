"""Functions that replace a file atomically, and functions for paths that are not valid UTF-8."""

from __future__ import annotations

import contextlib
import os
import pathlib
import uuid
from collections.abc import Iterator


def write_atomically(
    path: str | os.PathLike[str],
    *contents: str | bytes | memoryview,
    parents: bool = False,
    mode: int = 0o666,
) -> None:
    """Write the contents, one after another, to the file at `path`. If writing fails, the old file stays unchanged.

    Args:
        contents: parts of the file's content. Text is written as UTF-8.
        parents: True creates missing parent directories.
        mode: permissions of the file, before the process's umask is applied.
    """
    if parents:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with replacing(path) as temporary, open(temporary, "wb", opener=lambda name, _: os.open(name, flags, mode)) as file:
        for content in contents:
            file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yield a path for a temporary file. At the end, rename this file to `path`. After an error, remove this file."""
    path = pathlib.Path(path)
    # A random number is unique among all machines that share the directory. A process id is not.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.new")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def stored_id(path: pathlib.Path) -> str:
    """Return the id in the file at `path`. If the file does not exist, create it with a new random id."""
    if not path.exists():
        write_atomically(path, uuid.uuid4().hex, parents=True)
    return path.read_text()


class NativePath:
    """Converts a directory's path for C++ libraries in this process, which accept only paths in UTF-8.

    A non-ASCII path may be in another encoding. So it is replaced by a path in /proc, of a descriptor that is open
    until `close`.

    Attributes:
        path: the path to pass to the library.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path, self._descriptor = os.fspath(directory), -1
        if not self.path.isascii():
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            self.path = f"/proc/self/fd/{self._descriptor}"

    def close(self) -> None:
        """Close the descriptor. Later calls do nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def printable(text: str) -> str:
    """Return `text` with escapes, such as `a\\xff`, for the bytes that are not valid UTF-8."""
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")
