"""How collecting goes, in the names of the published environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Statistics:
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
        """Adds `train_perf/...` and `train/items_...`, and starts afresh."""
        if self.succeeded_task_duration:
            metrics["train/items_sent_to_api"] = len(self.succeeded_task_duration)
        if self.failed_task_duration:
            metrics["train/items_rejected"] = len(self.failed_task_duration)
        for name, values in vars(self).items():
            metrics |= spread(f"train_perf/{name}", values)
            values.clear()
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
