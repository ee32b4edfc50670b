"""What happened since the last row of the logs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from rlframe.metrics.sums import Sums, env_means
from rlframe.types import Logs


class Window:
    """Sums up steps, episodes and updates between two rows."""

    def __init__(self, env_steps: int) -> None:
        self._learner_logs: Logs | None = None
        self._logged: Sums = {}  # by the environments, until it began
        self._clear(env_steps)

    @property
    def first_step(self) -> int:
        """The environment steps at which it began."""
        return self._env_steps

    def add_episodes(self, logs: Logs) -> None:
        """Counts what `Actor.step` gave."""
        count = logs["episodes"]
        self._episodes += count
        self._returns += count * logs["episode_return"]
        self._lengths += count * logs["episode_length"]

    def add_update(self, logs: Logs) -> None:
        """Keeps what `Learner.step` gave; only the newest is fetched from the device, when a row is made."""
        self._learner_logs = logs

    def leave_out(self, seconds: float) -> None:
        """Takes time that was not training (an evaluation, a checkpoint) out of the speed."""
        self._start += seconds

    def row(self, env_steps: int, logged: Sums) -> dict[str, Any]:
        """The values of the row that ends here, and begins the next; `logged` as `Actor.logged` gives it.

        `episode_return`, `episode_length` (means) and `episodes` are there where an episode ended, and
        the learner's logs where it made an update.
        """
        values: dict[str, Any] = {}
        if self._episodes:
            values["episode_return"] = self._returns / self._episodes
            values["episode_length"] = self._lengths / self._episodes
            values["episodes"] = self._episodes
        values.update(env_means(logged, self._logged))
        self._logged = logged
        seconds = time.monotonic() - self._start
        values["steps_per_second"] = (env_steps - self._env_steps) / max(seconds, 1e-9)
        for name, value in (self._learner_logs or {}).items():
            values[name] = float(np.asarray(value).reshape(()))
        self._clear(env_steps)
        return values

    def _clear(self, env_steps: int) -> None:
        self._env_steps = env_steps
        self._start = time.monotonic()
        self._episodes = 0
        self._returns = self._lengths = 0.0
        self._learner_logs = None
