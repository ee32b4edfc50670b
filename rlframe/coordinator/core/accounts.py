"""The counters of a job, and their rates."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from rlframe.coordinator.messages import Learned
from rlframe.metrics.rows import ActorCounts

_SPAN = 5.0  # length in seconds of the time window of the rates


@dataclasses.dataclass
class Accounts(ActorCounts):
    """The counters of a job's collectors and learners, as written to the journal.

    Attributes:
        learner_steps: Updates in the newest parameters. Falls when a restarted learner continues from its checkpoint.
        granted: Batches that were granted to learners, or drawn for learners.
        learned: Granted batches on which learners trained.
        dropped: Granted batches that learners dropped.
        lost: Granted batches that were lost with a learner or a coordinator.
        learns: Number of learners' replies to grants.
        evaluated_at: Environment steps at the start of the newest evaluation.
        discarded: Unfinished fragments that were lost with a collector. A collector has one per environment.
    """

    learner_steps: int = 0
    params_version: int = -1
    granted: int = 0
    learned: int = 0
    dropped: int = 0
    lost: int = 0
    learns: int = 0
    discarded: int = 0
    evaluated_at: int = 0
    stale: int = 0  # number of replies to calls that are no longer pending
    retries: int = 0  # number of retries of tasks
    restarts: int = 0  # number of replaced workers
    coordinator_restarts: int = 0
    logs: dict[str, float] = dataclasses.field(default_factory=dict)
    returns: list[list[float]] = dataclasses.field(default_factory=list)  # [env_steps, mean return] of each metrics row
    evaluations: list[list[float]] = dataclasses.field(
        default_factory=list
    )  # [env_steps, mean return, version] of each evaluation

    def learn(self, reply: Learned) -> None:
        """Count the batches in a learner's reply to a grant."""
        self.reach(reply.learner_steps, reply.params_version)
        self.learned += len(reply.updates)
        self.dropped += reply.dropped
        self.learns += 1
        self.logs = dict(reply.logs) or self.logs

    def reach(self, learner_steps: int, params_version: int) -> None:
        """Record the number of updates and the newest version of a learner."""
        self.learner_steps = int(learner_steps)
        self.params_version = max(self.params_version, int(params_version))

    def to_json(self) -> dict[str, Any]:
        """Return the keyword arguments that recreate this object, as the journal stores them."""
        saved = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        copies = {name: value.copy() for name, value in saved.items() if isinstance(value, (dict, list))}
        return {**saved, **copies}  # shallow copies suffice, because nested values are never changed in place


class Rates:
    """Computes the rates of several counts, per second, over the last few seconds.

    Args:
        size: Number of counts.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._points: collections.deque[tuple[float, tuple[float, ...]]] = collections.deque()

    def add(self, now: float, *counts: float) -> None:
        """Record the current counts."""
        self._points.append((now, counts))
        while self._points[0][0] < now - _SPAN:
            self._points.popleft()

    def per_second(self, now: float) -> tuple[float, ...]:
        """Return the rate of each count, or 0 if there are no recent records."""
        recent = [point for point in self._points if point[0] >= now - _SPAN]
        if not recent or recent[0][0] >= now:
            return (0.0,) * self._size
        began, first = recent[0]
        return tuple((last - before) / (now - began) for before, last in zip(first, recent[-1][1]))
