"""Files of saved replay buffers: when they are written, which files are kept, and their format.

Arrays are written one after another, so saving a buffer of 7 GB does not need another 7 GB of memory. A file consists
of a magic line, the length and the CRC-32 of a JSON header, the header, and the bytes and the CRC-32 of each array. A
file has a temporary name until it is complete.
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
# Large saves, and saves that block inserts and samples, take at most this fraction of the time.
_MAX_SAVE_FRACTION = 0.05
_PIECE_BYTES = 1 << 24  # bytes per read, write and check
# A buffer of at most this size is saved with every checkpoint, so that a resumed run continues exactly.
_SMALL_BYTES = 64 * 2**20
_AT_END_BYTES = 2**30  # a larger buffer is not saved at the end, because a program that stops has only seconds
Shapes = dict[str, list[Any]]  # name of an array -> [dtype, shape]

_log = logging.getLogger(__name__)


class ReplayFiles:
    """Saved replay buffers in the files `directory/NUMBER`.

    For small buffers, the last `keep` files are kept. For a large buffer, only the last file is kept.

    Args:
        directory: directory of the files. It is created at the first save.
        keep: number of files to keep for small buffers.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int) -> None:
        self._directory, self._keep = Path(directory), keep
        self._next_large_save = time.monotonic()

    def numbers(self) -> list[int]:
        """Return the numbers of the complete files in ascending order."""
        return sorted(int(path.name) for path in self._directory.glob("*") if path.name.isdigit())

    def newest(self) -> int | None:
        """Return the highest number of a complete file, or None if there is no file."""
        return max(self.numbers(), default=None)

    @staticmethod
    def is_small(replay_buffer: Any) -> bool:
        """Return True if the buffer is small enough to be saved with every checkpoint."""
        return replay_buffer.stats()["bytes"] <= _SMALL_BYTES

    def is_due(self, replay_buffer: Any, final: bool = False) -> bool:
        """Return True if the buffer should be saved now.

        A small buffer is always due. A large buffer is due if its saves take less than 5 % of the time.

        Args:
            replay_buffer: the buffer to save. An empty buffer is never due.
            final: True if the program is ending. Then a buffer of up to 1 GiB is due.
        """
        stats = replay_buffer.stats()
        most = _AT_END_BYTES if final else _SMALL_BYTES
        return stats["steps"] > 0 and (stats["bytes"] <= most or time.monotonic() >= self._next_large_save)

    def save(self, replay_buffer: Any, number: int) -> None:
        """Save a buffer. Call this before you write the checkpoint with this number, and call `prune` afterwards.

        Raises:
            CheckpointError: the file could not be written. The other files are unchanged.
        """
        began = time.monotonic()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"Cannot write to {self._directory}: {error.strerror}.") from error
        replay_buffer.save(self.path(number))
        self._next_large_save = time.monotonic() + (time.monotonic() - began) / _MAX_SAVE_FRACTION

    def prune(self) -> None:
        """Remove files that no checkpoint needs, and incomplete files from killed processes."""
        for age, number in enumerate(reversed(self.numbers())):
            # Keep only one large file, because it can be as large as the main memory.
            if age and (age >= self._keep or self.path(number).stat().st_size > _SMALL_BYTES):
                self.path(number).unlink()
        for unfinished in self._directory.glob(".*.new"):
            unfinished.unlink()

    def drop_after(self, number: int) -> None:
        """Remove the files with numbers above `number`. Their checkpoints are incomplete."""
        for later in self.numbers():
            if later > number:
                self.path(later).unlink()

    def restore(self, replay_buffer: Any, number: int) -> int | None:
        """Restore a buffer from the newest file that is not newer than `number`. Warn if there is no file.

        Checkpoint 0 causes no warning, because it can be the initial checkpoint of a run that starts from another run.

        Returns:
            The number of the file, or None.

        Raises:
            CheckpointError: the file is damaged.
        """
        found = max((each for each in self.numbers() if each <= number), default=None)
        if found is not None:
            replay_buffer.restore(self.path(found))
        elif number:
            _log.warning(
                "Checkpoint %d has no replay buffer in %s. Learning waits until the buffer is full enough again.",
                number,
                self._directory,
            )
        return found

    def path(self, number: int) -> Path:
        """Return the path of the file with this number."""
        return self._directory / str(number)


def save_periodically(save: Callable[[], None], stop: threading.Event, seconds: float, at_end: float) -> None:
    """Call `save` every `seconds` seconds until `stop` is set, and once more at the end.

    Args:
        save: function that writes a checkpoint.
        stop: event that ends the loop.
        seconds: seconds between two checkpoints. The wait is longer if a checkpoint takes more than 5 % of this time.
        at_end: seconds for the last checkpoint. It is skipped if the previous checkpoint took longer.
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
    """Write `header` (JSON) and `arrays` (C-contiguous) to the file `path`. The write is atomic.

    Raises:
        CheckpointError: the file could not be written, for example because the disk is full. The old file is
            unchanged.
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
            f"The replay buffer could not be saved to {path}: {error}. The file that existed before is unchanged."
        ) from error


class SavedReplay(NamedTuple):
    """A file that the function `write` wrote. It is open for reading."""

    path: Path
    header: dict[str, Any]
    shapes: Shapes  # dtypes and shapes of the arrays in the file
    file: BufferedReader  # its position is the first array

    def check_shapes(self, arrays: dict[str, np.ndarray]) -> None:
        """Raise CheckpointError if the names, dtypes or shapes of the arrays in the file differ from `arrays`."""
        for name in arrays.keys() | self.shapes.keys():
            here = [arrays[name].dtype.str, list(arrays[name].shape)] if name in arrays else "missing"
            there = self.shapes.get(name)
            if here != there:
                raise CheckpointError(f"{self.path} was saved by another agent: {name} is {there}, not {here}.")

    def read(self, arrays: dict[str, np.ndarray]) -> None:
        """Read the arrays of the file into `arrays`. Skip arrays with other names. Call this method only once.

        Raises:
            CheckpointError: the file is damaged. Some arrays can already contain new values.
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
    """Open a file of a buffer with this `spec`, and read its header.

    Raises:
        CheckpointError: the file is missing, damaged, not a replay buffer, or from a buffer with a different `spec`.
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
                raise CheckpointError(f"{path} was saved by a replay buffer with {saved}, but this one has {spec!r}.")
            yield SavedReplay(path, header, shapes, file)
    except OSError as error:
        raise CheckpointError(f"The replay buffer could not be read from {path}: {error}.") from error


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _write_array(file: BinaryIO, array: np.ndarray) -> None:
    crc, data = 0, _bytes(array)
    for low in range(0, len(data), _PIECE_BYTES):
        piece = bytes(data[low : low + _PIECE_BYTES])  # copy, because another process can change the array
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
        raise CheckpointError(f"{path} is damaged: {where} is incomplete or changed. Delete this file, or use another.")
