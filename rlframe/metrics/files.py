"""Loggers that write rows to JSONL and CSV files. A killed run does not damage a file. A resumed run appends rows."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rlframe.interprocess.files import write_atomically
from rlframe.metrics.rows import Values, append, on_host, scalars, writing

Path = str | os.PathLike[str]

_LONGEST_ROW = 1 << 16  # maximum bytes of a row


class JSONLLogger:
    """A logger that writes one JSON object per row: `{"step": 8000, "episode_return": 213.5, ...}`.

    Each row is in the file when `write` returns. NaN and infinite numbers are written as null, because JSON does not
    have them. Arrays are written as lists.

    Args:
        path: The file. Rows are appended to an existing file. An incomplete last line is removed.
        resume_at: Rows after this step are removed, because a run that resumes at this step writes them again.
    """

    def __init__(self, path: Path, *, resume_at: int | None = None) -> None:
        self._file = _LineFile(path, _json_step, resume_at)

    def write(self, step: int, values: Values) -> None:
        row = {"step": int(step), **{name: _jsonable(value) for name, value in on_host(values).items()}}
        self._file.append(json.dumps(row, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


class CSVLogger:
    """A logger that writes the numbers of each row as a line of a table.

    If a row has a new name, the table gets one more column. This column is empty in earlier rows.

    Args: See `JSONLLogger`.
    """

    def __init__(self, path: Path, *, resume_at: int | None = None) -> None:
        self._path = pathlib.Path(path)
        self._file = _LineFile(path, _csv_step, resume_at)
        self._columns: list[str] = _read_csv(self._path)[0] if self._path.stat().st_size else []

    def write(self, step: int, values: Values) -> None:
        row = {"step": int(step), **scalars(on_host(values))}
        new = [name for name in row if name not in self._columns]
        if new:
            self._widen(new)
        self._file.append(_csv_line([row.get(name, "") for name in self._columns]))

    def close(self) -> None:
        self._file.close()

    def _widen(self, new: list[str]) -> None:
        rows = _read_csv(self._path)[1:] if self._columns else []
        columns = [*self._columns, *new]
        lines = [columns, *(row + [""] * (len(columns) - len(row)) for row in rows)]
        self._file.replace("".join(map(_csv_line, lines)))
        self._columns = columns


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that a `JSONLLogger` wrote. Omit the last line if it is incomplete."""
    return [row for row, _ in rows_after(path, 0)]


def rows_after(path: Path, position: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield (row, end) for each complete row of a `JSONLLogger`'s file after `position`. `end` is the end of the row.

    `position` and `end` count bytes. If `position` is inside a row, start with this row. This happens if a restarted
    monitor has replaced the rows before the position.
    """
    with open(path, "rb") as file:
        start = max(0, position - _LONGEST_ROW)
        file.seek(start)
        position = start + file.read(position - start).rfind(b"\n") + 1
        file.seek(position)
        for line in file:
            position += len(line)
            if _json_step(line) is not None:
                yield json.loads(line), position


class _LineFile:
    """A text file to which only complete lines are appended."""

    def __init__(self, path: Path, step_of: Callable[[bytes], int | None], resume_at: int | None) -> None:
        self._path = pathlib.Path(path)
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            self._file.truncate(_kept_bytes(self._path, step_of, resume_at))

    def append(self, line: str) -> None:
        append(self._file.fileno(), line.encode(), self._path)

    def replace(self, text: str) -> None:
        """Replace the content of the file atomically."""
        with writing(self._path):
            write_atomically(self._path, text)
            self._file.close()
            self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()


def _kept_bytes(path: pathlib.Path, step_of: Callable[[bytes], int | None], resume_at: int | None) -> int:
    """Return the number of bytes to keep: the complete rows to `resume_at`, and damaged lines between these rows."""
    kept = position = 0
    with path.open("rb") as file:
        for line in file:
            position += len(line)
            step = step_of(line)
            if step is not None and resume_at is not None and step > resume_at:
                break
            if step is not None:
                kept = position
    return kept


def _json_step(line: bytes) -> int | None:
    """Return the step of a complete row. Return None for any other line."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, TypeError, KeyError):
        return None


def _csv_step(line: bytes) -> int | None:
    """Return the step of a complete row, or -1 for the header. Return None for any other line."""
    first = line.split(b",", 1)[0].strip()
    if not line.endswith(b"\n") or not (first == b"step" or first.isdigit()):
        return None
    return -1 if first == b"step" else int(first)


def _jsonable(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.ndarray):
        return [_jsonable(element) for element in value.tolist()]
    if isinstance(value, list):
        return [_jsonable(element) for element in value]
    return value


def _read_csv(path: pathlib.Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def _csv_line(cells: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()
