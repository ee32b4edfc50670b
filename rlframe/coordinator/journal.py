"""The journal of a coordinator, on disk: a restarted coordinator continues from it."""

from __future__ import annotations

import json
import logging
import os
import pathlib
from typing import Any

from rlframe.errors import CheckpointError
from rlframe.interprocess.files import write_atomically

_log = logging.getLogger(__name__)

_COMPACT_AT = 4 * 2**20  # bytes
_KEPT_NOTES = 1000


class Journal:
    """A file of lines: states of the job, of which the newest counts, and the log of events.

    A line is written at once. If its writer is killed, the file has whole lines and at most a part of one more, which
    is cut off. The file is not synced with each line: it outlives its writer, but not a power failure. If the disk is
    full, the journal warns, keeps the line in memory and tries again with the next one.

        {"note": {"number": 1, "time": 1.7e9, "kind": "job", "text": "INIT → CONNECTING", ...}}
        {"state": {"state": "CONNECTING", "tasks": [], "accounts": {...}, "job_id": ..., ...}}

    Args:
        path: the file; its folder is made.

    Attributes:
        state: what was written last; None in a new file.
        notes: the newest events, oldest first.

    Raises:
        CheckpointError: the file cannot be read or written, or is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = pathlib.Path(path)
        self.state: dict[str, Any] | None = None
        self.notes: list[dict[str, Any]] = []
        self._file: Any = None
        self._is_behind = False  # of the memory
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
        """Add an event to the log."""
        self.notes.append(note)
        del self.notes[:-_KEPT_NOTES]
        self._append({"note": note})

    def close(self) -> None:
        """Close the file. May be called again."""
        self._file.close()

    def _append(self, record: dict[str, Any]) -> None:
        try:
            if not self._is_behind:
                self._write_line(json.dumps(record).encode() + b"\n")
            if self._is_behind or self._size > _COMPACT_AT:
                self._compact()
            if self._is_behind:
                _log.warning("%s is written again.", self._path)
            self._is_behind = False
        except OSError as error:
            if not self._is_behind:
                _log.warning("%s The job goes on, and the next line is another try.", self._unwritable(error))
            self._is_behind = True

    def _write_line(self, line: bytes) -> None:
        self._size += len(line)
        while line:  # a disk that is nearly full takes a part of it
            line = line[self._file.write(line) :]

    def _read(self) -> None:
        lines = self._path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], 1):  # what follows the last line's end was cut short
            try:
                record = json.loads(line)
                self.state = record.get("state", self.state)
                if "note" in record:
                    self.notes.append(record["note"])
            except (ValueError, AttributeError) as error:
                raise CheckpointError(
                    f"{self._path}, line {number}, is damaged: {error}. It must hold a JSON object with a state or a "
                    "note. Put back a copy of it, or remove it: what was learned stays, the counters begin anew."
                ) from error
        del self.notes[:-_KEPT_NOTES]

    def _compact(self) -> None:
        """Replace the file by the newest state and the kept events, atomically."""
        records: list[dict[str, Any]] = [{"note": note} for note in self.notes]
        if self.state is not None:
            records.append({"state": self.state})
        write_atomically(self._path, *(json.dumps(record) + "\n" for record in records))
        file = self._path.open("ab", buffering=0)
        if self._file is not None:
            self._file.close()
        self._file = file
        self._size = self._path.stat().st_size
        if self._size > _COMPACT_AT // 2:  # then its content is that large: no compaction with every line
            self._size = 0

    def _unwritable(self, error: OSError) -> str:
        return f"Cannot write {self._path}: {error.strerror}. Make room."
