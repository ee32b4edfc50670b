"""Replay buffers on disk: the files that go with checkpoints, when they are written, and their format.

A file is streamed array by array, so a buffer of 7 GB needs no second 7 GB. It is a magic line, the length and the
CRC-32 of a JSON header, the header, and then each array's bytes followed by their CRC-32. It is written beside its name
and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from rlframe.errors import CheckpointError
from rlframe.interprocess.files import replacing
from rlframe.types import ReplaySpec

_MAGIC = b"rlframe replay 2\n"
_LENGTHS = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_MAX_SAVE_FRACTION = 0.05  # of the time may go into writing large buffers, or those that inserts and samples wait for
_PIECE_BYTES = 1 << 24  # bytes that are read, written and checked at once
# A buffer up to this size goes with every checkpoint: a resumed run is then exact, wherever it stopped.
_SMALL_BYTES = 64 * 2**20
_AT_END_BYTES = 2**30  # a larger one is not written at the end: a program that stops has only seconds
Shapes = dict[str, list[Any]]  # an array's name -> its dtype's string and its shape

_log = logging.getLogger(__name__)


class ReplayFiles:
    """Saved replay buffers, `directory/NUMBER`: of small ones the last `keep`, of large ones the last.

    Args:
        directory: created at the first save.
        keep: how many small ones stay.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int) -> None:
        self._directory, self._keep = Path(directory), keep
        self._next_large_save = time.monotonic()

    def numbers(self) -> list[int]:
        """Return the numbers of the complete files, the lowest first."""
        return sorted(int(path.name) for path in self._directory.glob("*") if path.name.isdigit())

    def newest(self) -> int | None:
        """Return the highest number; None if there is no file."""
        return max(self.numbers(), default=None)

    @staticmethod
    def is_small(replay_buffer: Any) -> bool:
        """Return True if the buffer is small enough for every checkpoint."""
        return replay_buffer.stats()["bytes"] <= _SMALL_BYTES

    def is_due(self, replay_buffer: Any, final: bool = False) -> bool:
        """Return True for a small buffer, and for a large one if less than 5 % of the time goes into writing it.

        Args:
            replay_buffer: False if it is empty.
            final: the program ends: True for a buffer of up to 1 GiB.
        """
        stats = replay_buffer.stats()
        most = _AT_END_BYTES if final else _SMALL_BYTES
        return stats["steps"] > 0 and (stats["bytes"] <= most or time.monotonic() >= self._next_large_save)

    def save(self, replay_buffer: Any, number: int) -> None:
        """Write a buffer. Call it before writing the checkpoint of this number, and `prune` afterwards.

        Raises:
            CheckpointError: it could not be written; the other files are untouched.
        """
        began = time.monotonic()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"Cannot write to {self._directory}: {error.strerror}.") from error
        replay_buffer.save(self.path(number))
        self._next_large_save = time.monotonic() + (time.monotonic() - began) / _MAX_SAVE_FRACTION

    def prune(self) -> None:
        """Remove files that no checkpoint needs any more, and incomplete ones of writers that were killed."""
        for age, number in enumerate(reversed(self.numbers())):
            # One large file is kept: it may be as large as the memory.
            if age and (age >= self._keep or self.path(number).stat().st_size > _SMALL_BYTES):
                self.path(number).unlink()
        for unfinished in self._directory.glob(".*.new"):
            unfinished.unlink()

    def drop_after(self, number: int) -> None:
        """Remove the files with higher numbers: their checkpoints were never completed."""
        for later in self.numbers():
            if later > number:
                self.path(later).unlink()

    def restore(self, replay_buffer: Any, number: int) -> int | None:
        """Restore a buffer from the newest file up to `number`, and return its number. Warn if there is none.

        Raises:
            CheckpointError: the file is damaged.
        """
        found = max((each for each in self.numbers() if each <= number), default=None)
        if found is None:
            _log.warning(
                "No replay for checkpoint %d is in %s: learning waits until the buffer has filled again.",
                number,
                self._directory,
            )
        else:
            replay_buffer.restore(self.path(found))
        return found

    def path(self, number: int) -> Path:
        """Return the path of a file."""
        return self._directory / str(number)


def save_periodically(save: Callable[[], None], stop: threading.Event, seconds: float, at_end: float) -> None:
    """Call `save` every `seconds` seconds until `stop` is set, and then once more.

    Args:
        save: writes a checkpoint.
        stop: ends the loop.
        seconds: between two checkpoints; longer if a checkpoint takes more than a twentieth of that.
        at_end: seconds for the last one, which is left out if the one before took longer.
    """
    took = 0.0
    while not stop.wait(max(seconds, took / _MAX_SAVE_FRACTION)):
        began = time.monotonic()
        save()
        took = time.monotonic() - began
    if took < at_end:
        save()


def write(
    path: str | os.PathLike[str], spec: ReplaySpec, header: dict[str, Any], arrays: dict[str, np.ndarray]
) -> None:
    """Write `header` (JSON) and `arrays` (C-contiguous) to `path`, atomically.

    Raises:
        CheckpointError: it could not be written (a full disk, say). The old file is untouched.
    """
    path = Path(path)
    shapes = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    text = json.dumps({"spec": repr(spec), **header, "arrays": shapes}).encode()
    try:
        with replacing(path) as temporary, open(temporary, "wb") as file:
            file.write(_MAGIC + _LENGTHS.pack(len(text), zlib.crc32(text)) + text)
            for array in arrays.values():
                _write_array(file, array)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(
            f"The replay buffer could not be saved to {path}: {error}. What was saved there before is untouched."
        ) from error


class SavedReplay(NamedTuple):
    """A file that `write` has written, open for reading."""

    path: Path
    header: dict[str, Any]
    shapes: Shapes  # of its arrays
    file: BufferedReader  # at the first array

    def check_shapes(self, arrays: dict[str, np.ndarray]) -> None:
        """Raise `CheckpointError` unless the file has these arrays, with the same dtypes and shapes."""
        for name in arrays.keys() | self.shapes.keys():
            here = [arrays[name].dtype.str, list(arrays[name].shape)] if name in arrays else "nothing of that name"
            there = self.shapes.get(name)
            if here != there:
                raise CheckpointError(f"{self.path} was saved by another agent: {name} is {there} there, {here} here.")

    def read(self, arrays: dict[str, np.ndarray]) -> None:
        """Fill `arrays`, by their names, and skip the others of the file. Call it once.

        Raises:
            CheckpointError: the file is damaged. Some of the arrays may have been filled.
        """
        for name, (dtype, shape) in self.shapes.items():
            if name in arrays:
                _read_array(self.file, arrays[name], self.path, name)
            else:
                size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
                self.file.seek(size + _CRC.size, os.SEEK_CUR)
        _check_intact(not self.file.read(1), self.path, "its end")


@contextlib.contextmanager
def open_saved(path: str | os.PathLike[str], spec: ReplaySpec) -> Iterator[SavedReplay]:
    """Open the file `path` of a buffer with this `spec`, and read its header.

    Raises:
        CheckpointError: the file is missing, damaged, no replay buffer, or of a buffer with another `spec`.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise CheckpointError(f"{path} is damaged, or not a replay buffer that rlframe saved.")
            length, crc = _LENGTHS.unpack(_read_exactly(file, _LENGTHS.size, path))
            if length > os.fstat(file.fileno()).st_size:
                raise CheckpointError(f"{path} is damaged: it is shorter than its header.")
            text = _read_exactly(file, length, path)
            _check_intact(zlib.crc32(text) == crc, path, "its header")
            header = json.loads(text)
            shapes = header.pop("arrays")
            if header["spec"] != repr(spec):
                saved = header["spec"]
                raise CheckpointError(f"{path} was saved by a replay buffer with {saved}; this one has {spec!r}.")
            yield SavedReplay(path, header, shapes, file)
    except OSError as error:
        raise CheckpointError(f"The replay buffer could not be read from {path}: {error}.") from error


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _write_array(file: BinaryIO, array: np.ndarray) -> None:
    crc, data = 0, _bytes(array)
    for low in range(0, len(data), _PIECE_BYTES):
        piece = bytes(data[low : low + _PIECE_BYTES])  # a copy: another process may be writing to the array
        crc = zlib.crc32(piece, crc)
        file.write(piece)
    file.write(_CRC.pack(crc))


def _read_array(file: BufferedReader, array: np.ndarray, path: Path, name: str) -> None:
    crc, data = 0, _bytes(array)
    for low in range(0, len(data), _PIECE_BYTES):
        piece = data[low : low + _PIECE_BYTES]
        _check_intact(file.readinto(piece) == len(piece), path, name)
        crc = zlib.crc32(piece, crc)
    _check_intact(_CRC.unpack(_read_exactly(file, _CRC.size, path))[0] == crc, path, name)


def _read_exactly(file: BinaryIO, count: int, path: Path) -> bytes:
    data = file.read(count)
    _check_intact(len(data) == count, path, "its end")
    return data


def _check_intact(good: bool, path: Path, where: str) -> None:
    if not good:
        raise CheckpointError(f"{path} is damaged: {where} is not what was written. Delete it, or restore another.")
