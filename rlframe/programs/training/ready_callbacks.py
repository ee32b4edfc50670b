"""Ready-made callbacks: `rlframe.train(..., callbacks=[rlframe.StopAt(475)])`."""

from __future__ import annotations

from typing import Any

from rlframe.errors import UsageError
from rlframe.programs.policies.evaluation import evaluate
from rlframe.programs.training.callbacks import CallbackInfo


class StopAt:
    """End the run when a value of its rows reaches a limit.

    Args:
        limit: the limit.
        metric: name of the value. `return_mean` is the mean return of an evaluation, and needs `eval_every`.
            `episode_return` is the mean return of the training episodes since the previous row.
        rows: number of consecutive rows with this value that must reach the limit.
    """

    def __init__(self, limit: float, metric: str = "return_mean", rows: int = 1) -> None:
        if rows < 1:
            raise UsageError(f"StopAt: rows must be at least 1, got {rows}.")
        self._limit, self._metric, self._rows = limit, metric, rows
        self._reached = 0  # number of consecutive rows that have reached the limit

    def __call__(self, info: CallbackInfo) -> None:
        """Read a row, and end the run if the limit is reached."""
        if (value := info.values.get(self._metric)) is None:
            return
        self._reached = self._reached + 1 if value >= self._limit else 0
        if self._reached >= self._rows:
            info.stop()


class EvaluateOn:
    """Evaluate the policy in another environment too, after each evaluation of the run.

    The run evaluates every `eval_every` steps and at its end. Another evaluation plays in this process. In a single
    process, training waits for it.

    Args:
        env: the environment, as for `rlframe.evaluate`. None means the run's environment, with other `env_kwargs`.
        env_kwargs: as for `rlframe.evaluate`.
        episodes: number of episodes in each evaluation.

    Attributes:
        rows: one dict for each evaluation: `step`, and the values of `rlframe.evaluate`.
    """

    def __init__(self, env: Any = None, *, env_kwargs: dict[str, Any] | None = None, episodes: int = 20) -> None:
        self._options = {"env": env, "env_kwargs": env_kwargs, "episodes": episodes}
        self.rows: list[dict[str, Any]] = []

    def __call__(self, info: CallbackInfo) -> None:
        """Evaluate if the row belongs to an evaluation of the run."""
        if "return_mean" in info.values:
            self.rows.append({"step": info.step, **evaluate(info.run_dir, **self._options)})
