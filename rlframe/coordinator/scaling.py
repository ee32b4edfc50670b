"""Automatic scaling: choose the number of collectors, so that the learner seldom waits and no collector is wasted."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from rlframe.coordinator.core.job import TrainingJob
from rlframe.coordinator.states import JobState


@dataclasses.dataclass(frozen=True)
class Load:
    """The load in one time window.

    Attributes:
        collectors: Number of collectors.
        seconds: Length of the window in seconds.
        learner_waiting_seconds: Seconds that the learner waited for data.
        env_steps: Environment steps of all collectors.
        waiting_share: Share of the collectors' total time, from 0 to 1, in which they waited for newer parameters or
            for free space in the buffer.
        staleness: Mean age, in versions, of the data in a batch; None if the learner has not learned yet.
    """

    collectors: int
    seconds: float
    learner_waiting_seconds: float
    env_steps: int
    waiting_share: float
    staleness: float | None = None


class _Counters(NamedTuple):
    """Counters since the start of the job."""

    time: float  # seconds
    learner_waited: float  # seconds in which the learner had no data
    env_steps: int
    collectors_worked: float  # seconds of all collectors, including those in which they waited
    collectors_waited: float  # seconds in which collectors waited

    @classmethod
    def read(cls, job: TrainingJob, now: float) -> _Counters:
        waited = job.learner.seconds_without_data(now)
        return cls(now, waited, job.accounts.env_steps, job.collectors.seconds, job.collectors.seconds_waited)


class Scaling:
    """A rule that chooses the number of collectors from the load in consecutive time windows. It reads no clock.

    - Add a collector if the learner waited for data for more than `STARVED` of the window, and collectors waited for
      less than `IDLE` of their time.
    - Remove a collector if the data is older than `mean_staleness`, or if collectors waited for more than `IDLE` of
      their time and the learner waited for less than `STARVED`.
    - Skip one window after a change, because a new collector compiles first.
    - Remove a new collector if it did not help: the steps per second did not increase, and the learner did not wait
      less. Then pause. Each pause is twice as long as the previous pause. On busy cores, or with a slow game, more
      collectors do not help.

    Args:
        least, most: Minimum and maximum number of collectors.
        cores: Number of the machine's cores. There are never more collectors than cores, but at least `least`.
        mean_staleness: Maximum of the mean staleness, in versions; None means no maximum.
    """

    STARVED, IDLE = 0.2, 0.5
    _FIRST_PAUSE = 4  # length of the first pause, as a number of windows
    _WINDOW_SECONDS = 5.0

    def __init__(self, least: int, most: int, cores: int, mean_staleness: float | None = None) -> None:
        self.least, self.most = least, max(least, min(most, cores))
        self._mean_staleness = mean_staleness
        self._windows_to_skip = 0
        self._load_before: Load | None = None  # load in the window before the last collector was added
        self._pause_windows = self._FIRST_PAUSE
        self._window: _Counters | None = None  # the counters at the start of the window

    def wanted(self, job: TrainingJob, now: float) -> int | None:
        """Return the new number of collectors, or None to keep the current number.

        The number changes only at the end of a window. It never changes if a person chose it, while the job does not
        run, or while collectors start.
        """
        after, before = _Counters.read(job, now), self._window
        if job.requests.count_is_manual or job.state is not JobState.RUNNING or before is None:
            self._window = after
            return None
        if now - before.time < self._WINDOW_SECONDS:
            return None
        self._window = after
        count = job.requests.wanted["collector"]
        if len([worker for worker in job.roster.of("collector") if worker.progress.params_version is not None]) < count:
            return None
        load = Load(
            collectors=count,
            seconds=now - before.time,
            learner_waiting_seconds=after.learner_waited - before.learner_waited,
            env_steps=after.env_steps - before.env_steps,
            waiting_share=(after.collectors_waited - before.collectors_waited)
            / max(after.collectors_worked - before.collectors_worked, 1e-9),
            staleness=job.accounts.logs.get("staleness"),
        )
        wanted = self.judge(load)
        return wanted if wanted != count else None

    def judge(self, load: Load) -> int:
        """Return the number of collectors for the next window."""
        count, waited = load.collectors, load.learner_waiting_seconds / max(load.seconds, 1e-9)
        if self._windows_to_skip > 0:
            self._windows_to_skip -= 1
            return self._within(count)
        before, self._load_before = self._load_before, None
        if before is not None and not _is_better(load, before):
            self._windows_to_skip, self._pause_windows = self._pause_windows, 2 * self._pause_windows
            return self._within(count - 1)  # the added collector did not help
        is_old = self._mean_staleness is not None and (load.staleness or 0.0) > self._mean_staleness
        if is_old or (load.waiting_share > self.IDLE and waited < self.STARVED):
            return self._change(count - 1)
        if waited > self.STARVED and load.waiting_share < self.IDLE and count < self.most:
            self._load_before = load
            return self._change(count + 1)
        return self._within(count)

    def _change(self, count: int) -> int:
        self._windows_to_skip = 1
        return self._within(count)

    def _within(self, count: int) -> int:
        return min(max(count, self.least), self.most)


def _is_better(load: Load, before: Load) -> bool:
    """Return True if the added collector helped: the learner waits 10 % less, or the steps per second rose by 10 %.

    The waiting time alone is not enough: with two slow collectors, a learner waits nearly as long as with one
    collector, but it learns twice as much.
    """
    seconds, seconds_before = max(load.seconds, 1e-9), max(before.seconds, 1e-9)
    waits_less = load.learner_waiting_seconds / seconds <= 0.9 * before.learner_waiting_seconds / seconds_before
    return waits_less or load.env_steps / seconds >= 1.1 * before.env_steps / seconds_before
