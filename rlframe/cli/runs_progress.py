"""Show the progress of several runs on stderr, for `rlframe train --seeds`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from rlframe.cli.multi_run import SeedRun
from rlframe.metrics.terminal import TerminalLogger
from rlframe.programs.run_dir.directory import RunDir
from rlframe.programs.run_dir.status import RunRows

_SECONDS_BETWEEN_READS = 0.5


class RunsProgress:
    """A display of the steps of all runs together, their mean return, and the remaining time.

    It reads the rows that the runs write to their directories. Call `update` often.

    Args:
        runs: all runs, also those that are finished or not started.
        steps: number of steps of each run.
        is_shown: if False, show nothing.
    """

    def __init__(self, runs: Sequence[SeedRun], steps: int, *, is_shown: bool = True) -> None:
        self._steps = steps
        self._rows = [RunRows(RunDir(run.path).metrics) for run in runs if is_shown]
        title = f"{len(runs)} run{'s' * (len(runs) > 1)}"
        self._display = TerminalLogger(len(runs) * steps, title=title) if is_shown else None
        self._next_read = 0.0

    def update(self) -> None:
        """Read new rows and draw the display, if some time has passed since the last call."""
        if self._display is None or time.monotonic() < self._next_read:
            return
        newest = [rows.read() for rows in self._rows]
        returns = [row["episode_return"] for row in newest if row.get("episode_return") is not None]
        steps = sum(min(row.get("step", 0), self._steps) for row in newest)
        self._display.write(steps, {"episode_return": np.mean(returns)} if returns else {})
        self._next_read = time.monotonic() + _SECONDS_BETWEEN_READS

    def close(self) -> None:
        """Draw the display a last time."""
        if self._display is not None:
            self._next_read = 0.0
            self.update()
            self._display.close()
