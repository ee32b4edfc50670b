"""The rows of a run: written to its files and loggers, and passed on to the loggers of another process."""

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

_NUMBERS = ("return_mean", "return_std", "length_mean", "episodes")  # of `Evaluator.evaluate`
_LOOK_EVERY = 0.5  # seconds between two looks at the rows that another process has written


class RowWriter:
    """Writes the rows of a session, and measures its speed.

    Rows go to the files of the run directory, and to `session.loggers` (trackers, the progress, callbacks). If the
    program has several processes, these loggers are in the launcher's process, and `forward_rows` passes rows to them.

    Args:
        session: the session.
        step: of the logs, at which the session begins. Rows after it are removed from the files.
        counts: what the actors had done by then.

    Attributes:
        eval_return: mean return of the newest evaluation; None before the first.
    """

    def __init__(self, session: Session, step: int, counts: ActorCounts) -> None:
        self._session, self._files = session, session.directory.open_logs(step)
        self._logger = MultiLogger([self._files, *session.loggers])
        self._rows = Rows(step, counts.total(), counts.total_logged(), time.monotonic())
        self._first: tuple[float, int] | None = None  # time and step at which training was first seen to advance
        self._last = (0.0, 0)
        self.eval_return: float | None = None

    def record_step(self, step: int) -> None:
        """Take the step of training now. Its speed is measured from the first note to the last."""
        self._last = time.monotonic(), step
        self._first = self._first or self._last

    def exclude(self, seconds: float) -> None:
        """Exclude time that was not training (an evaluation, a checkpoint) from the speed."""
        self._rows.began += seconds
        if self._first is not None:
            self._first = self._first[0] + seconds, self._first[1]

    def write(self, step: int, counts: ActorCounts, values: Callable[[], Mapping[str, Any]]) -> bool:
        """Write the row of training that ends at this step, with `values()` in it.

        Returns:
            False if no step was taken since the row before: there is nothing to write.
        """
        if step == self._rows.step:
            return False
        more = values()
        self.log(step, {**self._rows.next(step, counts, time.monotonic()), **more})
        return True

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Write a row that is complete but for the time: the rows of training have it."""
        if "steps_per_second" in row:
            row = {**row, "wall_seconds": time.time() - self._session.began}
        self._logger.write(step, row)

    def log_evaluation(self, step: int, row: Mapping[str, Any]) -> None:
        """Write the row of an evaluation, with its `return_mean`."""
        self.eval_return = row["return_mean"]
        self.log(step, row)

    def close(self) -> None:
        """Close the files. Loggers are closed by the process that made them."""
        self._files.close()

    @property
    def seconds(self) -> float:
        """Seconds since the newest row of training."""
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
        """Return how the session ended.

        Args:
            env_steps: of the whole run.
            learner: its `learner_steps` and `params_version`.
            evaluation: the final evaluation.
            stopped_by: see `Result`.
            signal: the number of the signal that stopped it, and the final evaluation, if one was under way.
            steps_per_row_step: environment steps in a step of the logs.
            metrics: all numbers of that evaluation; None: `return_mean`, `return_std`, `length_mean` and `episodes`.
        """
        (began, first), (ended, last) = self._first or self._last, self._last
        values = evaluation.values or {}
        if metrics is None and values:
            metrics = {name: values[name] for name in _NUMBERS}
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
    """Pass each row that another process writes to a file to the loggers, until the context ends.

    Args:
        path: the file, `metrics.jsonl`.
        loggers: they get each row, in a thread of this process.
        callbacks: one of them, or none of the loggers; its request to end the run is repeated until the run ends.
    """
    logger, over = MultiLogger(loggers), threading.Event()
    at = path.stat().st_size if path.exists() else 0

    def read() -> None:
        nonlocal at
        try:
            at = min(at, path.stat().st_size)  # a restarted monitor may take its last row back
            for row, position in rows_after(path, at):
                at = position
                logger.write(row.pop("step"), row)
        except FileNotFoundError:
            pass

    def follow() -> None:
        while not over.wait(_LOOK_EVERY):
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
