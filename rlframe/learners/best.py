"""The best checkpoint of a run: the checkpoint whose evaluation had the highest mean return.

It is a copy in `CHECKPOINTS/best/STEP`, because old checkpoints are deleted. The copy consists of hard links, so it
takes no space while the original exists. `CHECKPOINTS/best/best.json` names the best one, and is written atomically
after the copy is complete. A process that is killed therefore leaves the earlier best checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import NamedTuple

from rlframe.interprocess.files import write_atomically

_log = logging.getLogger(__name__)


class Best(NamedTuple):
    """The best checkpoint so far."""

    step: int  # number of the checkpoint
    return_mean: float  # mean return of its evaluation


class BestCheckpoint:
    """Keeps the checkpoint with the highest mean return. Of equal returns, the newest one counts.

    Args:
        checkpoints: directory of the checkpoints.

    Attributes:
        checkpoints: see Args.
        directory: directory of the copies, with the same layout as `checkpoints`.
    """

    def __init__(self, checkpoints: str | os.PathLike[str]) -> None:
        self.checkpoints = pathlib.Path(checkpoints).absolute()
        self.directory = self.checkpoints / "best"
        self._record = self.directory / "best.json"

    def read(self) -> Best | None:
        """Return the best checkpoint, or None if there is none."""
        try:
            best = Best(**json.loads(self._record.read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return best if (self.directory / str(best.step)).is_dir() else None

    def copies(self) -> list[pathlib.Path]:
        """Return the directories of all copies: the best one, and perhaps one whose evaluation has not ended."""
        return [path for path in self.directory.glob("*") if path.is_dir()]

    def keep(self, step: int) -> None:
        """Copy a checkpoint before its evaluation, so that it exists at the end. Log a warning if that fails."""
        with _warn_if_it_fails(step):
            self._copy(step)

    def offer(self, step: int, return_mean: float) -> None:
        """Make a checkpoint the best one, unless the best one has a higher return. Remove all other copies."""
        best = self.read()
        if math.isfinite(return_mean) and (best is None or return_mean >= best.return_mean):
            with _warn_if_it_fails(step):
                self._copy(step)
                write_atomically(self._record, json.dumps(Best(step, return_mean)._asdict()), "\n")
        best = self.read()
        for path in self.copies():
            if best is None or path.name != str(best.step):
                shutil.rmtree(path, ignore_errors=True)

    def _copy(self, step: int) -> None:
        target, temporary = self.directory / str(step), self.directory / f"{step}.tmp"
        if not target.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
            shutil.copytree(self.checkpoints / str(step), temporary, copy_function=_link)
            temporary.rename(target)


@contextlib.contextmanager
def _warn_if_it_fails(step: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _log.warning("Checkpoint %d cannot be kept as the best one: %s", step, error)


def _link(source: str, target: str) -> None:
    """Make a hard link. Copy the file instead if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
