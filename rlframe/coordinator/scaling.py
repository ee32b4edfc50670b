"""Choose the number of collectors: enough that the learner need not wait, and no more than it can learn from."""

from __future__ import annotations

import dataclasses

from rlframe.coordinator.core.job import TrainingJob
from rlframe.coordinator.states import JobState


@dataclasses.dataclass(frozen=True)
class Load:
    """The load in a window of time.

    Attributes:
        collectors: that are at work.
        seconds: how long it was.
        learner_waited: seconds of it in which the learner waited for data.
        env_steps: that were taken in it.
        paced: share of their time that collectors waited: for newer parameters, or for room.
        staleness: mean age in versions of the data that was learned from; None if nothing was learned.
    """

    collectors: int
    seconds: float
    learner_waiting_seconds: float
    env_steps: int
    waiting_share: float
    staleness: float | None = None


class Scaling:
    """Chooses the number of collectors from the load in one window of time after another. It has no clock.

    - One more if the learner waited for data for more than `STARVED` of the window, and collectors did not wait.
    - One fewer if the data is older than `mean_staleness`, or collectors waited for more than `IDLE` of the window.
    - After a change the next window is not judged: a new collector compiles first.
    - If one more collector brought neither more steps nor a learner that waits less, it is removed. The next try comes
      after a pause, which doubles. On busy cores, or with a slow game, more collectors cannot feed the learner.

    Args:
        least, most: bounds of the number of collectors.
        cores: of the machine, a second upper bound.
        mean_staleness: versions; None: no bound.
    """

    STARVED, IDLE = 0.2, 0.5
    _FIRST_PAUSE = 4  # windows
    _WINDOW_SECONDS = 5.0  # of a window

    def __init__(self, least: int, most: int, cores: int, mean_staleness: float | None = None) -> None:
        self.least, self.most = least, max(least, min(most, cores))
        self._mean_staleness = mean_staleness
        self._windows_to_skip = 0  # windows to let pass
        self._load_before: Load | None = None  # a collector was added
        self._pause_windows = self._FIRST_PAUSE
        self._window: tuple[float, float, int, float, float] | None = None  # the counters at its begin

    def wanted(self, job: TrainingJob, now: float) -> int | None:
        """Return the number of collectors from now on, at the end of a window; None: as many as are wanted.

        No window is judged if a person chose the number, while the job does not run, or while collectors start.
        """
        steps = job.accounts.env_steps
        here = (
            now,
            job.learner.seconds_without_data(now),
            steps,
            job.collectors.seconds,
            job.collectors.seconds_waited,
        )
        if job.requests.count_is_manual or job.state is not JobState.RUNNING or self._window is None:
            self._window = here
            return None
        began, waited, steps_before, collected, waiting_share = self._window
        if now - began < self._WINDOW_SECONDS:
            return None
        self._window = here
        count = job.requests.wanted["collector"]
        if len([worker for worker in job.roster.of("collector") if worker.progress.params_version is not None]) < count:
            return None
        load = Load(
            collectors=count,
            seconds=now - began,
            learner_waiting_seconds=job.learner.seconds_without_data(now) - waited,
            env_steps=steps - steps_before,
            waiting_share=(job.collectors.seconds_waited - waiting_share)
            / max(job.collectors.seconds - collected, 1e-9),
            staleness=job.accounts.logs.get("staleness"),
        )
        wanted = self.judge(load)
        return wanted if wanted != count else None

    def judge(self, load: Load) -> int:
        """Return the number of collectors after this window."""
        count, waited = load.collectors, load.learner_waiting_seconds / max(load.seconds, 1e-9)
        if self._windows_to_skip > 0:
            self._windows_to_skip -= 1
            return self._within(count)
        before, self._load_before = self._load_before, None
        if before is not None and not _is_better(load, before):
            self._windows_to_skip, self._pause_windows = self._pause_windows, 2 * self._pause_windows
            return self._within(count - 1)  # it brought nothing
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
    """Return True if one more collector made a difference.

    The share of waiting alone does not tell: a learner that two slow collectors feed waits nearly as long as with one,
    and learns twice as much.
    """
    seconds, seconds_before = max(load.seconds, 1e-9), max(before.seconds, 1e-9)
    waits_less = load.learner_waiting_seconds / seconds <= 0.9 * before.learner_waiting_seconds / seconds_before
    return waits_less or load.env_steps / seconds >= 1.1 * before.env_steps / seconds_before
