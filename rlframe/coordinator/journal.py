"""The journal of a coordinator, a file from which a restarted coordinator continues."""

from __future__ import annotations

import json
import logging
import os
import pathlib
from typing import Any

from rlframe.errors import CheckpointError
from rlframe.interprocess.files import write_atomically

_log = logging.getLogger(__name__)

_COMPACT_AT = 4 * 2**20  # file size in bytes above which the file is rewritten in a shorter form
_KEPT_NOTES = 1000


class Journal:
    """A file in which each line is a state of the job or a note of the log. Only the newest state counts.

    Each line is written at once. If the writer is killed, only the last line can be incomplete; it is dropped. The file
    is not synced after each line, so it survives the death of its writer, but not a power failure. If the disk is full,
    the journal logs a warning, keeps the line in memory, and tries again with the next line.

        {"note": {"number": 1, "time": 1.7e9, "kind": "job", "text": "INIT → CONNECTING", ...}}
        {"state": {"state": "CONNECTING", "tasks": [], "accounts": {...}, "job_id": ..., ...}}

    Args:
        path: Path of the file. Its directory is created.

    Attributes:
        state: Newest state; None in a new file.
        notes: Newest notes, oldest first.

    Raises:
        CheckpointError: The file cannot be read or written, or is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = pathlib.Path(path)
        self.state: dict[str, Any] | None = None
        self.notes: list[dict[str, Any]] = []
        self._file: Any = None
        self._is_behind = False  # True if some lines are in memory but not in the file
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                self._read()
            self._compact()
        except OSError as error:
            raise CheckpointError(self._unwritable(error)) from error

    def write(self, state: dict[str, Any]) -> None:
        """Write a state of the job."""
        self.state = state
        self._append({"state": state})

    def note(self, note: dict[str, Any]) -> None:
        """Add a note to the log."""
        self.notes.append(note)
        del self.notes[:-_KEPT_NOTES]
        self._append({"note": note})

    def close(self) -> None:
        """Close the file. Repeated calls change nothing."""
        self._file.close()

    def _append(self, record: dict[str, Any]) -> None:
        try:
            if not self._is_behind:
                self._write_line(json.dumps(record).encode() + b"\n")
            if self._is_behind or self._size > _COMPACT_AT:
                self._compact()
            if self._is_behind:
                _log.warning("%s can be written again and is complete.", self._path)
            self._is_behind = False
        except OSError as error:
            if not self._is_behind:
                _log.warning(
                    "%s The job continues. The journal tries again with its next line.", self._unwritable(error)
                )
            self._is_behind = True

    def _write_line(self, line: bytes) -> None:
        self._size += len(line)
        while line:  # if the disk is nearly full, `write` can stop within the line
            line = line[self._file.write(line) :]

    def _read(self) -> None:
        lines = self._path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], 1):  # text after the last newline is an incomplete line
            try:
                record = json.loads(line)
                self.state = record.get("state", self.state)
                if "note" in record:
                    self.notes.append(record["note"])
            except (ValueError, AttributeError) as error:
                raise CheckpointError(
                    f"{self._path}, line {number}, is damaged: {error}. It must hold a JSON object with a state or a "
                    "note. Restore the file from a backup, or remove it: the checkpoints stay, the counters restart."
                ) from error
        del self.notes[:-_KEPT_NOTES]

    def _compact(self) -> None:
        """Rewrite the file atomically, with only the newest state and notes."""
        records: list[dict[str, Any]] = [{"note": note} for note in self.notes]
        if self.state is not None:
            records.append({"state": self.state})
        write_atomically(self._path, *(json.dumps(record) + "\n" for record in records))
        file = self._path.open("ab", buffering=0)
        if self._file is not None:
            self._file.close()
        self._file = file
        self._size = self._path.stat().st_size
        if self._size > _COMPACT_AT // 2:  # if the file is still large, do not compact it again with every line
            self._size = 0

    def _unwritable(self, error: OSError) -> str:
        return f"Cannot write {self._path}: {error.strerror}. Free some disk space."
