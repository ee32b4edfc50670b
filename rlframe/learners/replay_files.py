"""The files of a replay that goes with a learner's checkpoints: each in full or not at all."""

from __future__ import annotations

import logging
import os
import pathlib
from typing import Any

from rlframe.errors import CheckpointError

_log = logging.getLogger(__name__)

# A replay up to this size goes with every checkpoint: a resumed run is then exact, wherever it stopped.
_SMALL_BYTES = 64 * 2**20


class ReplayFiles:
    """Replays saved as `directory/NUMBER`: of small ones the last `keep`, of large ones the last.

    Args:
        directory: created at the first save.
        keep: how many small ones stay, as many as there are checkpoints that name them.
    """

    def __init__(self, directory: str | os.PathLike, keep: int) -> None:
        self._directory, self._keep = pathlib.Path(directory), keep

    def numbers(self) -> list[int]:
        """The numbers of those that are there, complete, the lowest first."""
        return sorted(int(path.name) for path in self._directory.glob("*") if path.name.isdigit())

    def newest(self) -> int | None:
        """The highest number; None where there is none."""
        return max(self.numbers(), default=None)

    @staticmethod
    def is_small(replay_buffer: Any) -> bool:
        """Whether a replay goes with every checkpoint."""
        return replay_buffer.stats()["bytes"] <= _SMALL_BYTES

    def save(self, replay_buffer: Any, number: int) -> None:
        """Writes a replay. Call it before the checkpoint that names it is written, and `prune` afterwards.

        Raises:
            CheckpointError: it could not be written; those that were there are untouched.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"Cannot write to {self._directory}: {error.strerror}.") from error
        replay_buffer.save(self._path(number))

    def prune(self) -> None:
        """Removes what no checkpoint needs any more, and what writers that died left."""
        for age, number in enumerate(reversed(self.numbers())):
            # One large replay is kept: it may well be as large as the memory.
            if age and (age >= self._keep or self._path(number).stat().st_size > _SMALL_BYTES):
                self._path(number).unlink()
        for unfinished in self._directory.glob(".*.new"):
            unfinished.unlink()

    def drop_after(self, number: int) -> None:
        """Removes those of checkpoints that were never completed, or were removed."""
        for later in self.numbers():
            if later > number:
                self._path(later).unlink()

    def find(self, number: int | None) -> pathlib.Path | None:
        """The file that a checkpoint names. Warns where it is gone."""
        if number is None or number in self.numbers():
            return None if number is None else self._path(number)
        _log.warning(
            "The replay of this checkpoint (%s) is no longer there: learning waits until the buffer has filled again.",
            self._path(number),
        )
        return None

    def _path(self, number: int) -> pathlib.Path:
        return self._directory / str(number)
