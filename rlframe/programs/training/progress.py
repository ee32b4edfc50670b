"""The file `RUN_DIR/progress.json`, which stores the step counts of a program."""

from __future__ import annotations

import json
import logging
import pathlib
from typing import Any

from rlframe.errors import CheckpointError
from rlframe.interprocess.files import write_atomically
from rlframe.metrics.rows import COUNTERS, ActorCounts

_log = logging.getLogger(__name__)


class ProgressFile:
    """The file with the step counts of a program. A restarted monitor and the next session read them and continue.

    Args:
        path: The file. It is not necessary that it exists.
        session_id: ID of the session. The key "before" has the total counts of all earlier sessions.

    Raises:
        CheckpointError: The file is damaged.

    Attributes:
        counts: Counts of the actors.
        evaluated: Step at which the newest logged evaluation started. None means no evaluation so far.
        ended: Reason why the session ends before its last step. None means no early stop.
    """

    def __init__(self, path: pathlib.Path, session_id: str) -> None:
        self._path, self._session_id = path, session_id
        self._save_failed = False  # the last save failed, for example because the disk is full
        self.counts = ActorCounts()
        self.evaluated: int | None = None
        self.ended: str | None = None
        if path.exists():
            saved_session, self.counts, self.evaluated, self.ended = self._read()
            if saved_session != session_id:
                self.ended = None
                total, logged = list(self.counts.total().values()), self.counts.total_logged()
                self.counts = ActorCounts({"before": total}, {"before": logged})

    def save(self) -> None:
        """Write the file atomically. Raise CheckpointError if that fails."""
        content = {
            "session": self._session_id,
            "evaluated": self.evaluated,
            "ended": self.ended,
            "counts": self.counts.counters,
            "logged": self.counts.logged,
        }
        try:
            write_atomically(self._path, json.dumps(content))
        except OSError as error:
            raise CheckpointError(
                f"Cannot write {self._path}: {error.strerror}. Free some disk space, then resume the run."
            ) from error

    def try_to_save(self) -> None:
        """Write the file. If this fails, log only one warning. The monitor calls this again at the next row."""
        try:
            self.save()
        except CheckpointError as error:
            if not self._save_failed:
                _log.warning("%s", error)
            self._save_failed = True
        else:
            if self._save_failed:
                _log.warning("Writing %s works again.", self._path)
            self._save_failed = False

    def _read(self) -> tuple[str, ActorCounts, int | None, str | None]:
        try:
            saved: dict[str, Any] = json.loads(self._path.read_text())
            counters = {actor: [each + 0 for each in values] for actor, values in saved["counts"].items()}
            if any(len(values) != len(COUNTERS) for values in counters.values()):
                raise ValueError(f"not every actor has {len(COUNTERS)} counters")
            evaluated = None if saved["evaluated"] is None else int(saved["evaluated"])
            return saved["session"], ActorCounts(counters, saved.get("logged", {})), evaluated, saved.get("ended")
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{self._path} is damaged: {type(error).__name__}: {error}. It must contain the counts of the actors: "
                f'{{"session": ..., "evaluated": STEPS, "counts": {{"RANK.INCARNATION": '
                f"[{', '.join(COUNTERS)}]}}}}. Restore a copy of the file, or remove it. If you remove it, the "
                "checkpoints stay, but steps are counted from 0, and the logs start again."
            ) from error
