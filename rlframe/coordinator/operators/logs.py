"""Workers write to files, which outlive who reads them; this shows their lines as they come."""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
from typing import TextIO

from rlframe.engines.logs import shown

_EVERY = 0.1  # seconds
_AT_ONCE = 1 << 16  # bytes of one file per look, so that one that says much does not hold up the others


class LogTail:
    """Copies what is appended to files to a stream, each line behind the name of who wrote it.

    Args:
        output: where the lines go.
    """

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._files: dict[str, _File] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlframe worker logs", daemon=True)
        self._thread.start()

    def follow(self, name: str, path: pathlib.Path) -> None:
        """Shows what is appended to the file from now on; may be repeated."""
        with self._lock:
            if name not in self._files:
                self._files[name] = _File(path)

    def last_words(self, name: str) -> str:
        """The last line that this worker wrote; of a traceback, the error."""
        with self._lock:
            file = self._files.get(name)
            if file is None:
                return ""
            self._show(name, file)
            return file.last_line

    def say(self, name: str, text: str) -> None:
        """Shows a line that is no worker's own."""
        with contextlib.suppress(OSError, ValueError):  # who reads has died, or the stream is closed
            self._output.write(shown(name, text))
            self._output.flush()

    def close(self) -> None:
        """Shows what is left, and stops."""
        self._closed.set()
        self._thread.join(2.0)
        self._look()

    def _run(self) -> None:
        while not self._closed.wait(_EVERY):
            self._look()

    def _look(self) -> None:
        with self._lock:
            for name, file in self._files.items():
                self._show(name, file)

    def _show(self, name: str, file: _File) -> None:
        for line in file.new_lines():
            self.say(name, line)


class _File:
    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""
        self.last_line = ""

    def new_lines(self) -> list[str]:
        """Whole lines that were appended since."""
        try:
            if os.path.getsize(self._path) <= self._offset:
                return []
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                new = file.read(_AT_ONCE)
        except OSError:
            return []
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        texts = [line.decode(errors="replace") for line in lines]
        self.last_line = next((text for text in reversed(texts) if text.strip()), self.last_line)
        return texts
