"""The rows of a run's logs, and the numbers of its result. (Elastic's rows: `coordinator/core/accounts.py`.)"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from rlframe.metrics import Logger
from rlframe.metrics.sums import Sums, env_means
from rlframe.programs.run import Run
from rlframe.programs.run_dir import Result

_NUMBERS = ("return_mean", "return_std", "length_mean", "episodes")  # of `Evaluator.evaluate`


class RowWriter:
    """Writes what happened since the row before, and keeps how fast it went.

    Args:
        run: the session.
        logger: where the rows go.
        step: of the logs, at which the session begins.
        counts: env_steps, episodes, return_sum and length_sum of all actors until then; empty where there are none.
        logged: what the environments logged until then.
    """

    def __init__(
        self, run: Run, logger: Logger, step: int, counts: Mapping[str, float] | None = None, logged: Sums | None = None
    ) -> None:
        self._run, self.logger = run, logger
        self.step = step  # of the newest row
        self._counts, self._logged = dict(counts or {}), logged or {}
        self._row_began = time.monotonic()
        self._first: tuple[float, int] | None = None  # when training was first seen to go on, and at which step
        self._last = (0.0, 0)

    def note(self, step: int) -> None:
        """Takes the step that training is at now: its speed is that from the first note to the last one."""
        self._last = time.monotonic(), step
        self._first = self._first or self._last

    def leave_out(self, seconds: float) -> None:
        """Takes time that was not training (an evaluation, a checkpoint) out of the speed."""
        self._row_began += seconds
        if self._first is not None:
            self._first = self._first[0] + seconds, self._first[1]

    def write(
        self,
        step: int,
        values: Callable[[], Mapping[str, Any]],
        counts: Mapping[str, float],
        logged: Sums,
    ) -> bool:
        """Writes the row that ends at this step, with `values()` in it; not where no step was taken since the last.

        `episode_return`, `episode_length` (means) and `episodes` are there where an episode ended.

        Returns:
            Whether there was a row to write.
        """
        if step == self.step:
            return False
        row: dict[str, Any] = {}
        new = {name: counts[name] - self._counts.get(name, 0) for name in counts}
        if new.get("episodes"):
            row["episode_return"] = new["return_sum"] / new["episodes"]
            row["episode_length"] = new["length_sum"] / new["episodes"]
            row["episodes"] = int(new["episodes"])
        row.update(env_means(logged, self._logged))
        now = time.monotonic()
        row["steps_per_second"] = (step - self.step) / max(now - self._row_began, 1e-9)
        row.update(values())
        row["wall_seconds"] = time.time() - self._run.began
        self._row_began, self.step, self._counts, self._logged = now, step, dict(counts), logged
        self.logger.write(step, row)
        return True

    @property
    def seconds(self) -> float:
        """Since the newest row."""
        return max(time.monotonic() - self._row_began, 1e-9)

    def result(
        self,
        env_steps: int,
        learner: Mapping[str, Any],
        evaluation: Mapping[str, Any] | None,
        stopped_by: str,
        *,
        signal: int | None = None,
        steps_per_row_step: int = 1,
        metrics: dict[str, float] | None = None,
        evaluation_error: str | None = None,
    ) -> Result:
        """How the session ended.

        Args:
            env_steps: of the whole run.
            learner: its `learner_steps` and `params_version`.
            evaluation: what the final evaluation gave; None or empty where there was none.
            stopped_by: see `Result`.
            signal: the number of the one that stopped it.
            steps_per_row_step: environment steps in a step of the logs.
            metrics: all numbers of that evaluation; None: `return_mean`, `return_std`, `length_mean` and `episodes`.
            evaluation_error: why the final evaluation failed.
        """
        (began, first), (ended, last) = self._first or self._last, self._last
        evaluation = evaluation or {}
        if metrics is None and evaluation:
            metrics = {name: evaluation[name] for name in _NUMBERS}
        return Result(
            env_steps=env_steps,
            learner_steps=learner.get("learner_steps", 0),
            return_mean=evaluation.get("return_mean"),
            return_std=evaluation.get("return_std"),
            episodes=int(evaluation.get("episodes", 0)),
            steps_per_second=(last - first) * steps_per_row_step / max(ended - began, 1e-9),
            wall_seconds=time.time() - self._run.began,
            params_version=learner.get("params_version", 0),
            run_dir=str(self._run.path),
            stopped_by=stopped_by,
            signal=signal,
            evaluation=metrics,
            evaluation_error=evaluation_error,
        )


def next_multiple(every: int, after: int) -> float:
    """The next multiple of `every` steps; never, where that is 0."""
    return (after // every + 1) * every if every else math.inf
