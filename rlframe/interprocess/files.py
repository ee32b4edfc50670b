"""Atomic replacement of files, and paths that are not valid UTF-8."""

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
        contents: the contents. Text is written as UTF-8.
        parents: create the file's missing parent directories.
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
    """Yield a temporary path. At the end, rename the file there to `path`. After an error, remove the file."""
    path = pathlib.Path(path)
    # The random number makes the name unique on all machines that share the directory. A process id would not.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.new")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


class NativePath:
    """A directory's path in a form that C++ libraries in this process can open. These libraries expect UTF-8.

    The bytes of a non-ASCII path may be invalid UTF-8, and Python may encode paths differently. So a non-ASCII path is
    replaced by the /proc path of an open descriptor. The /proc path is valid until `close`.

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
    """Return `text` with each byte that is not valid UTF-8 written as an escape: `a\\xff`."""
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")
