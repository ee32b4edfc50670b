"""Files and paths: files replaced atomically while others read them, and paths that are not UTF-8."""

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
    """Write the contents, one after the other, to the file at `path`; if it raises, the file is as it was before.

    Args:
        contents: text is written as UTF-8.
        parents: whether to make the folders that it is in.
        mode: permissions of the file, less the process's umask.
    """
    if parents:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with replacing(path) as temporary, open(temporary, "wb", opener=lambda name, _: os.open(name, flags, mode)) as file:
        for content in contents:
            file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Give a path to write to, which takes the place of `path` at the end, or is removed after an error."""
    path = pathlib.Path(path)
    # Nobody else's: threads of other machines that share the folder may have the same ids.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.new")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


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
