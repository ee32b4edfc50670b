"""Metrics of an environment. Their names are the same as in `atroposlib`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from rlframe.language.environments.config import BaseEnvConfig
from rlframe.metrics import Logger, WandbLogger


class Tracker(Logger, Protocol):
    """Logs an environment's metrics. An implementation is `WandbLogger`."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
        """Convert a table of text to a value that can be logged as one metric."""


class CollectStatistics:
    """Records how long attempts to collect groups take, since the last report.

    Attributes:
        task_duration, succeeded_task_duration, failed_task_duration: Seconds of each attempt, without pauses.
        mainloop_timings: Seconds between two status requests to the service.
        workers_added_per_attempt: Number of attempts that could be started after each status request.
    """

    def __init__(self) -> None:
        self.task_duration: list[float] = []
        self.succeeded_task_duration: list[float] = []
        self.failed_task_duration: list[float] = []
        self.mainloop_timings: list[float] = []
        self.workers_added_per_attempt: list[float] = []

    def record(self, seconds: float, sent: bool) -> None:
        self.task_duration.append(seconds)
        (self.succeeded_task_duration if sent else self.failed_task_duration).append(seconds)

    def report(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Add `train_perf/...` and `train/items_...` to the metrics. Then delete the records."""
        if self.succeeded_task_duration:
            metrics["train/items_sent_to_api"] = len(self.succeeded_task_duration)
        if self.failed_task_duration:
            metrics["train/items_rejected"] = len(self.failed_task_duration)
        for name, values in vars(self).items():
            metrics |= summary(f"train_perf/{name}", values)
            values.clear()
        return metrics


class GroupStatistics:
    """Records the scores of sequences since the last report, and the staleness of groups (in parameter versions)."""

    def __init__(self) -> None:
        self.scores: list[float] = []
        self.staleness: list[int] = []
        self._newest = -1

    def add(self, scores: Iterable[float], version: int | None, newest: int | None) -> None:
        """Add a group. `version` and `newest` are the oldest and the newest parameter version that sampled it."""
        self.scores += map(float, scores)
        if version is not None:
            self._newest = max(self._newest, version, -1 if newest is None else newest)
            self.staleness.append(self._newest - version)

    def report(self) -> dict[str, float]:
        """Return `train/reward` (the mean score), `train/score_...` and `train/staleness`. Then delete the records."""
        metrics = summary("train/score", self.scores)
        if self.scores:
            metrics["train/reward"] = metrics["train/score_mean"]
        if self.staleness:
            metrics["train/staleness"] = float(np.mean(self.staleness))
        self.scores, self.staleness = [], []
        return metrics


def summary(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the mean, standard deviation, maximum and minimum; {} if there are no values."""
    if not values:
        return {}
    return {
        f"{name}_mean": float(np.mean(values)),
        f"{name}_std": float(np.std(values)),
        f"{name}_max": float(np.max(values)),
        f"{name}_min": float(np.min(values)),
    }


def length_metrics(lengths: list[int], longest: int) -> dict[str, float]:
    """Return the metrics `train/completion_lengths...`; {} if there are no lengths.

    `longest` is the maximum length of a sequence, in tokens.
    """
    name = "train/completion_lengths"
    metrics = summary(name, lengths)
    if metrics:
        metrics[name] = metrics.pop(f"{name}_mean")
        # The name comes from `atroposlib`. The value is the fraction of nearly too long sequences, not a percentile.
        metrics[f"{name}_p95"] = sum(one > 0.95 * longest for one in lengths) / len(lengths)
    return metrics


def open_wandb(config: BaseEnvConfig, project: str | None, group: str | None, name: str | None) -> WandbLogger | None:
    """Start a run in Weights & Biases. Return None if the config disables it."""
    if not config.use_wandb:
        return None
    return WandbLogger(
        None,
        project=project or None,
        group=group or None,
        name=name,
        config=config.model_dump(mode="json"),
        required_by="use_wandb",
        otherwise="or --env.use_wandb false",
    )
