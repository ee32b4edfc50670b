"""`VersionCounter` counts the published versions of the parameters. Its numbers increase even after a crash."""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Callable

from rlframe.errors import CheckpointError
from rlframe.interprocess.files import write_atomically

# Reserve several versions with each write of the file, so that the writes take at most 1/200 of the time.
# If updates are slow, reserve one version with each write. A killed learner then skips no version.
_COST = 200
_RESERVE = 1_000  # maximum number of versions to reserve at once
_FILE_BYTES = 64  # fixed size of the file


class VersionCounter:
    """A counter that never returns the same value twice, even after a crash.

    Values are reserved in a small file before they are used. After a crash, the counter continues above the reserved
    values. A clean stop releases the unused values.

    Args:
        directory: directory of the file `versions.json`. None writes no file.
        check_may_write: called before the file is written. If it raises, nothing is written.
    """

    def __init__(self, directory: str | os.PathLike | None, check_may_write: Callable[[], None] | None = None) -> None:
        self._check_may_write = check_may_write or (lambda: None)
        self._path = pathlib.Path(directory) / "versions.json" if directory is not None else None
        # The first value needs no reservation, because nothing is published before it.
        self._reserved = self.value = 1
        self._written, self._cost = (0, 0.0), 0.0  # (value, time) of the last reservation; seconds that its write took

    def next(self, count: int = 1) -> int:
        """Return the next value. With `count`, skip values as if `next` was called `count` times."""
        self.value += count
        if self._path is not None and self.value > self._reserved:
            self._reserve(self.value + self._ahead())
        return self.value

    def _ahead(self) -> int:
        """Return the number of values to reserve in addition to the next value."""
        (value, at), now = self._written, time.monotonic()
        self._written = self.value, now
        # if the file were written for each value: fraction of the time spent in writes
        part = self._cost * (self.value - value) / max(now - at, 1e-6)
        return min(_RESERVE, int(part * _COST)) if value else 0

    def skip(self, value: int) -> None:
        """Continue above `value`, which another counter may have returned."""
        self.value = max(self.value, value)
        self.next()

    def release(self) -> None:
        """Release the reserved values above the current one. Call it after the final save."""
        if self._path is not None and self._reserved != self.value:
            self._reserve(self.value)

    def resume(self, value: int) -> None:
        """Continue from a checkpoint's `value`. Skip all values that may have been used after the checkpoint."""
        self.value = value
        if self._path is not None and self._path.exists():
            try:
                self._reserved = int(json.loads(self._path.read_text())["reserved"])
            except (ValueError, KeyError, TypeError, OSError) as error:
                raise CheckpointError(
                    f'{self._path} is damaged: {type(error).__name__}: {error}. It must hold {{"reserved": N}}, where '
                    "N is at least the newest version of the parameters that was published (params_version in the "
                    "run's logs)."
                ) from error
            # After a clean stop, `value` equals the reserved value. Otherwise, all reserved values may have been used.
            self.value = value if value == self._reserved else max(value, self._reserved) + 1

    def _reserve(self, upto: int) -> None:
        assert self._path is not None
        self._check_may_write()
        began = time.perf_counter()
        try:
            text = json.dumps({"reserved": upto}).ljust(_FILE_BYTES)
            try:
                write_atomically(self._path, text, parents=True)
            except OSError:  # The disk may be full. Overwrite the old file, which has the same size.
                with self._path.open("r+") as file:
                    file.write(text)
        except OSError as error:
            raise CheckpointError(f"Cannot write {self._path}: {error}. Free some space, then resume.") from error
        self._reserved, self._cost = upto, time.perf_counter() - began
