"""How many steps a program's actors have taken, whichever of them come and go."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

COUNTERS = ("env_steps", "episodes", "return_sum", "length_sum")


class Census:
    """Adds up what actors say of themselves, and keeps it in a file.

    Each says how much it has done since it was made, so nothing is counted twice, however often it is asked; a
    restarted actor is another incarnation of its rank, and what the one before said last still counts.

    Args:
        path: the file, which may not be there yet.
        session: names the program. Actors of an earlier one have said all that they will.

    Attributes:
        goes_on: whether the file is of this session already.
    """

    def __init__(self, path: pathlib.Path, session: str) -> None:
        self._path, self._session = path, session
        self._counts: dict[str, list[float]] = {}  # "rank.incarnation" -> its counters
        self.goes_on = False
        if path.exists():
            saved = json.loads(path.read_text())
            self._counts = saved["counts"]
            self.goes_on = saved["session"] == session
            if not self.goes_on:
                self._counts = {"before": list(self.total().values())}

    def add(self, stats: dict[str, Any]) -> None:
        """Takes what `Actor.stats` gave."""
        self._counts[f"{stats['rank']}.{stats['incarnation']}"] = [stats[name] for name in COUNTERS]

    def total(self) -> dict[str, float]:
        """The counters of all actors and incarnations: env_steps, episodes, return_sum, length_sum."""
        sums = [sum(values) for values in zip(*self._counts.values())] or [0] * len(COUNTERS)
        return dict(zip(COUNTERS, sums))

    def save(self) -> None:
        """Writes the file in one piece."""
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"session": self._session, "counts": self._counts}))
        os.replace(temporary, self._path)
