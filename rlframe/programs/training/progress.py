"""The file in which a program keeps its progress: `RUN_DIR/progress.json`."""

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
    """What a program has counted: a restarted monitor, and the next session, continue from it.

    Args:
        path: the file, which may not exist yet.
        session: names the session. The actors of earlier sessions count together, as "before".

    Raises:
        CheckpointError: the file is damaged.

    Attributes:
        counts: what the actors have done.
        evaluated: the step at which the newest evaluation began that is in the logs; None: there is none.
        ended: why the session ends before its last step; None while it goes on.
    """

    def __init__(self, path: pathlib.Path, session_id: str) -> None:
        self._path, self._session_id = path, session_id
        self._is_behind = False  # the file is older than the counts: the disk is full
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
        """Write the file in one piece. Raise CheckpointError if that fails."""
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
            raise CheckpointError(f"Cannot write {self._path}: {error.strerror}. Make room, then resume.") from error

    def try_to_save(self) -> None:
        """Write the file, or warn once that this fails: the next row is another try."""
        try:
            self.save()
        except CheckpointError as error:
            if not self._is_behind:
                _log.warning("%s", error)
            self._is_behind = True
        else:
            if self._is_behind:
                _log.warning("%s is written again.", self._path)
            self._is_behind = False

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
                f"{self._path} is damaged: {type(error).__name__}: {error}. It must hold what the run's actors have "
                f'done: {{"session": ..., "evaluated": STEPS, "counts": {{"RANK.INCARNATION": '
                f"[{', '.join(COUNTERS)}]}}}}. Put back a copy of it, or remove it: what was learned stays, but steps "
                "are counted from 0, and the logs begin anew."
            ) from error
