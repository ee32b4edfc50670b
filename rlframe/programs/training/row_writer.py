"""Write rows of logs to the files and loggers of a run, and read rows that another process wrote."""

from __future__ import annotations

import contextlib
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlframe.metrics import Logger, MultiLogger
from rlframe.metrics.files import rows_after
from rlframe.metrics.rows import ActorCounts, Rows
from rlframe.programs.policies.evaluation import EvaluationOutcome
from rlframe.programs.run_dir.directory import Result
from rlframe.programs.session import Session
from rlframe.programs.training.callbacks import Callbacks

# `Evaluator.evaluate` returns values with these names
_EVALUATION_METRICS = ("return_mean", "return_std", "length_mean", "episodes")
_POLL_SECONDS = 0.5  # seconds between two reads of the file that another process writes


class RowWriter:
    """A writer of a session's rows of logs. It also measures the speed of training.

    It writes rows to the files of the run directory, and to `session.loggers` (trackers, progress, callbacks). In a
    program of several processes, the loggers are in the launcher, and `forward_rows` passes the rows to them.

    Args:
        session: The session.
        step: First step of the session. Rows of later steps are removed from the files.
        counts: Counts of the actors at the first step.

    Attributes:
        eval_return: Mean return of the newest evaluation. None means no evaluation so far.
    """

    def __init__(self, session: Session, step: int, counts: ActorCounts) -> None:
        self._session, self._files = session, session.directory.open_logs(step)
        self._logger = MultiLogger([self._files, *session.loggers])
        self._rows = Rows(step, counts.total(), counts.total_logged(), time.monotonic())
        self._first: tuple[float, int] | None = None  # (time, step) of the first `record_step`
        self._last = (0.0, 0)
        self.eval_return: float | None = None

    def record_step(self, step: int) -> None:
        """Store the time of the current step. The speed of training is computed from the first and the last call."""
        self._last = time.monotonic(), step
        self._first = self._first or self._last

    def exclude(self, seconds: float) -> None:
        """Exclude the given time from the speed of training, for example the time of an evaluation."""
        self._rows.began += seconds
        if self._first is not None:
            self._first = self._first[0] + seconds, self._first[1]

    def write(self, step: int, counts: ActorCounts, values: Callable[[], Mapping[str, Any]]) -> bool:
        """Write a training row for `step`. It includes the result of `values()`.

        Returns:
            True if a row was written. False if there was no step since the last row.
        """
        if step == self._rows.step:
            return False
        more = values()
        self.log(step, {**self._rows.next(step, counts, time.monotonic()), **more})
        return True

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Write a row. To a training row, add the wall time."""
        if "steps_per_second" in row:
            row = {**row, "wall_seconds": time.time() - self._session.began}
        self._logger.write(step, row)

    def log_evaluation(self, step: int, row: Mapping[str, Any]) -> None:
        """Write the row of an evaluation, and set `eval_return`."""
        self.eval_return = row["return_mean"]
        self.log(step, row)

    def close(self) -> None:
        """Close the files, but not the loggers. The process that made the loggers closes the loggers."""
        self._files.close()

    @property
    def seconds(self) -> float:
        """Seconds since the last training row."""
        return max(time.monotonic() - self._rows.began, 1e-9)

    def result(
        self,
        env_steps: int,
        learner: Mapping[str, Any],
        evaluation: EvaluationOutcome,
        stopped_by: str,
        *,
        signal: int | None = None,
        steps_per_row_step: int = 1,
        metrics: dict[str, float] | None = None,
    ) -> Result:
        """Make the result of the session.

        Args:
            env_steps: Environment steps of the whole run.
            learner: Stats of the learner, with `learner_steps` and `params_version`.
            evaluation: Outcome of the final evaluation.
            stopped_by: See `Result`.
            signal: Number of the signal that stopped the session, or None.
            steps_per_row_step: Number of environment steps per step of the logs. The two differ for language models.
            metrics: All metrics of the evaluation. None means to use `return_mean`, `return_std`, `length_mean` and
                `episodes`.
        """
        (began, first), (ended, last) = self._first or self._last, self._last
        values = evaluation.values or {}
        if metrics is None and values:
            metrics = {name: values[name] for name in _EVALUATION_METRICS}
        return Result(
            env_steps=env_steps,
            learner_steps=learner.get("learner_steps", 0),
            return_mean=values.get("return_mean"),
            return_std=values.get("return_std"),
            episodes=int(values.get("episodes", 0)),
            steps_per_second=(last - first) * steps_per_row_step / max(ended - began, 1e-9),
            wall_seconds=time.time() - self._session.began,
            params_version=learner.get("params_version", 0),
            run_dir=str(self._session.path),
            stopped_by=stopped_by,
            signal=signal,
            evaluation=metrics,
            evaluation_error=evaluation.problem if signal is None else None,
        )


@contextlib.contextmanager
def forward_rows(path: pathlib.Path, loggers: list[Logger], callbacks: Callbacks) -> Iterator[None]:
    """Until the context ends, read the rows that another process writes to a file, and pass them to loggers.

    Args:
        path: The file `metrics.jsonl`.
        loggers: The loggers. A thread of this process calls them. If there are callbacks, `callbacks` is in the list.
        callbacks: The user's callbacks. If one requests the end of the run, repeat the request until the run ends.
    """
    logger, over = MultiLogger(loggers), threading.Event()
    at = path.stat().st_size if path.exists() else 0

    def read() -> None:
        nonlocal at
        try:
            at = min(at, path.stat().st_size)  # a restarted monitor can remove the last row
            for row, position in rows_after(path, at):
                at = position
                logger.write(row.pop("step"), row)
        except FileNotFoundError:
            pass

    def follow() -> None:
        while not over.wait(_POLL_SECONDS):
            read()
            callbacks.request_end()

    thread = threading.Thread(target=follow, name="rlframe rows", daemon=True)
    if loggers:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if loggers:
            thread.join()
            read()
