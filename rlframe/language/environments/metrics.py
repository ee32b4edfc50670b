"""Metrics of an environment, in the names of the published ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from rlframe.language.environments.config import BaseEnvConfig
from rlframe.metrics import Logger, WandbLogger


class Tracker(Logger, Protocol):
    """A logger of the metrics of an environment: a `WandbLogger`, or what a run's monitor reads."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
        """Return rows of text as one value of a row."""


class CollectStatistics:
    """Collected since they were last reported.

    Attributes:
        task_duration, succeeded_task_duration, failed_task_duration: seconds for a group, without pauses.
        mainloop_timings: seconds from one look at the service to the next.
        workers_added_per_attempt: groups that could be started at each look.
    """

    def __init__(self) -> None:
        self.task_duration: list[float] = []
        self.succeeded_task_duration: list[float] = []
        self.failed_task_duration: list[float] = []
        self.mainloop_timings: list[float] = []
        self.workers_added_per_attempt: list[float] = []

    def ended(self, seconds: float, sent: bool) -> None:
        self.task_duration.append(seconds)
        (self.succeeded_task_duration if sent else self.failed_task_duration).append(seconds)

    def report(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Add `train_perf/...` and `train/items_...`, and start afresh."""
        if self.succeeded_task_duration:
            metrics["train/items_sent_to_api"] = len(self.succeeded_task_duration)
        if self.failed_task_duration:
            metrics["train/items_rejected"] = len(self.failed_task_duration)
        for name, values in vars(self).items():
            metrics |= spread(f"train_perf/{name}", values)
            values.clear()
        return metrics


class GroupStatistics:
    """Scores of the sequences since they were last reported, and by how many policy versions groups were too old."""

    def __init__(self) -> None:
        self.scores: list[float] = []
        self.staleness: list[int] = []
        self._newest = -1

    def add(self, scores: Iterable[float], version: int | None, newest: int | None) -> None:
        """Take a group; `version` is the oldest that answered for it, `newest` the newest."""
        self.scores += map(float, scores)
        if version is not None:
            self._newest = max(self._newest, version, -1 if newest is None else newest)
            self.staleness.append(self._newest - version)

    def report(self) -> dict[str, float]:
        """`train/reward` (the mean score), `train/score_...` and `train/staleness`, and start afresh."""
        metrics = spread("train/score", self.scores)
        if self.scores:
            metrics["train/reward"] = metrics["train/score_mean"]
        if self.staleness:
            metrics["train/staleness"] = float(np.mean(self.staleness))
        self.scores, self.staleness = [], []
        return metrics


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation and bounds; empty where there are no values."""
    if not values:
        return {}
    return {
        f"{name}_mean": float(np.mean(values)),
        f"{name}_std": float(np.std(values)),
        f"{name}_max": float(np.max(values)),
        f"{name}_min": float(np.min(values)),
    }


def length_metrics(lengths: list[int], longest: int) -> dict[str, float]:
    """`train/completion_lengths...`, of sequences that may be `longest` tokens long; empty where there are none."""
    name = "train/completion_lengths"
    metrics = spread(name, lengths)
    if metrics:
        metrics[name] = metrics.pop(f"{name}_mean")
        # Not a percentile: the part of them that is almost as long as can be. The name is the published one.
        metrics[f"{name}_p95"] = sum(one > 0.95 * longest for one in lengths) / len(lengths)
    return metrics


def open_wandb(config: BaseEnvConfig, project: str | None, group: str | None, name: str | None) -> WandbLogger | None:
    """Begin a run in Weights & Biases; None if the environment's config says that there is none."""
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
