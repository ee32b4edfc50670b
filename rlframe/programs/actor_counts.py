"""How many steps a program's actors have taken, whichever of them come and go."""

from __future__ import annotations

import json
import logging
import pathlib
from typing import Any

from rlframe.errors import CheckpointError
from rlframe.interprocess.files import write_atomically
from rlframe.metrics.sums import Sums, add_up

_log = logging.getLogger(__name__)

COUNTERS = ("env_steps", "episodes", "return_sum", "length_sum")


class ActorCounts:
    """Adds up what actors say of themselves, and keeps it in a file.

    Each says how much it has done since it was made, so nothing is counted twice, however often it is asked; a
    restarted actor is another incarnation of its rank, and what the one before said last still counts.

    Args:
        path: the file, which may not be there yet.
        session: names the program. Actors of an earlier one have said all that they will.

    Raises:
        CheckpointError: the file is damaged.

    Attributes:
        goes_on: whether the file is of this session already.
        evaluated: the step at which the newest evaluation began whose values are written; None: there is none.
        ended: why the session ends before its last step; None while it goes on.
    """

    def __init__(self, path: pathlib.Path, session: str) -> None:
        self._path, self._session = path, session
        self._counts: dict[str, list[float]] = {}  # "rank.incarnation" -> its counters
        self._logged: dict[str, Sums] = {}  # "rank.incarnation" -> what its environments logged
        self._is_behind = False  # the file, of what is known: the disk is full
        self.goes_on = False
        self.evaluated: int | None = None
        self.ended: str | None = None
        if path.exists():
            saved_session, self._counts, self._logged, self.evaluated, self.ended = self._read()
            self.goes_on = saved_session == session
            if not self.goes_on:
                self.ended = None
                self._counts = {"before": list(self.total().values())}
                self._logged = {"before": self.logged()}

    def add(self, stats: dict[str, Any]) -> None:
        """Takes what `Actor.stats` gave."""
        who = f"{stats['rank']}.{stats['incarnation']}"
        self._counts[who] = [stats[name] for name in COUNTERS]
        self._logged[who] = stats.get("logged", {})

    @property
    def counts(self) -> dict[str, list[float]]:
        """The counters of each, by "rank.incarnation"; of earlier sessions together, by "before"."""
        return dict(self._counts)

    def replace(self, counts: dict[str, list[float]]) -> None:
        """Takes all of them anew, from who counts for itself."""
        self._counts = dict(counts)

    def total(self) -> dict[str, float]:
        """The counters of all actors and incarnations: env_steps, episodes, return_sum, length_sum."""
        sums = [sum(values) for values in zip(*self._counts.values())] or [0] * len(COUNTERS)
        return dict(zip(COUNTERS, sums))

    def logged(self) -> Sums:
        """What the environments of all actors and incarnations logged."""
        return add_up(self._logged.values())

    def save(self) -> None:
        """Writes the file in one piece. Raises CheckpointError where it cannot be written."""
        try:
            content: dict[str, Any] = {"session": self._session, "evaluated": self.evaluated, "ended": self.ended}
            content["counts"] = self._counts
            write_atomically(self._path, json.dumps({**content, "logged": self._logged}))
        except OSError as error:
            raise CheckpointError(f"Cannot write {self._path}: {error.strerror}. Make room, then resume.") from error

    def try_to_save(self) -> None:
        """Writes the file, or warns once that it cannot be written just now: the next row is another try."""
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

    def _read(self) -> tuple[str, dict[str, list[float]], dict[str, Sums], int | None, str | None]:
        try:
            saved = json.loads(self._path.read_text())
            counts = {who: [each + 0 for each in values] for who, values in saved["counts"].items()}
            if any(len(values) != len(COUNTERS) for values in counts.values()):
                raise ValueError(f"not every actor has {len(COUNTERS)} counters")
            evaluated = saved["evaluated"]
            evaluated = None if evaluated is None else int(evaluated)
            return saved["session"], counts, saved.get("logged", {}), evaluated, saved.get("ended")
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            counters = ", ".join(COUNTERS)
            raise CheckpointError(
                f"{self._path} is damaged: {type(error).__name__}: {error}. It must hold what the run's actors have "
                f'done: {{"session": ..., "evaluated": STEPS, "counts": {{"RANK.INCARNATION": [{counters}]}}}}. Put '
                "back a copy of it, or remove it: what was learned stays, but steps are counted from 0, and the logs "
                "begin anew."
            ) from error
