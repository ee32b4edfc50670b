"""The counters of a job, and their rates."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from rlframe.coordinator.messages import Learned
from rlframe.metrics.rows import ActorCounts

_SPAN = 5.0  # seconds that rates are measured over


@dataclasses.dataclass
class Accounts(ActorCounts):
    """The counters of a job's collectors and learners, as they are in the journal. Only `learner_steps` may fall.

    Attributes:
        learner_steps: updates in the newest parameters: a restarted learner continues from its checkpoint.
        granted: batches that learners were told to learn from.
        learned: granted batches that they learned from.
        dropped: granted batches that they reported as dropped.
        lost: granted batches of a learner, or a coordinator, that died.
        learns: answers of learners about at least one batch.
        evaluated_at: environment steps at which the newest evaluation was begun.
        discarded: open fragments of lost collectors: one of each of their environments.
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
    stale: int = 0  # answers to calls that were not waited for
    retries: int = 0  # of tasks
    restarts: int = 0  # of workers
    coordinator_restarts: int = 0
    logs: dict[str, float] = dataclasses.field(default_factory=dict)
    returns: list[list[float]] = dataclasses.field(default_factory=list)  # [env_steps, mean return] of each row
    evaluations: list[list[float]] = dataclasses.field(default_factory=list)  # [env_steps, mean return, version]

    def learn(self, reply: Learned) -> None:
        """Take the answer of a learner to a grant."""
        self.reach(reply.learner_steps, reply.params_version)
        self.learned += len(reply.updates)
        self.dropped += reply.dropped
        self.learns += 1
        self.logs = dict(reply.logs) or self.logs

    def reach(self, learner_steps: int, params_version: int) -> None:
        """Take the progress of a learner."""
        self.learner_steps = int(learner_steps)
        self.params_version = max(self.params_version, int(params_version))

    def to_json(self) -> dict[str, Any]:
        """Return the arguments of an equal `Accounts`, for the journal."""
        saved = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        copies = {name: value.copy() for name, value in saved.items() if isinstance(value, (dict, list))}
        return {**saved, **copies}  # the values in them are replaced, and never changed


class Rates:
    """How fast some counts rise, per second of the last seconds.

    Args:
        size: how many counts.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._points: collections.deque[tuple[float, tuple[float, ...]]] = collections.deque()

    def add(self, now: float, *counts: float) -> None:
        """Take the counts as they are now."""
        self._points.append((now, counts))
        while self._points[0][0] < now - _SPAN:
            self._points.popleft()

    def per_second(self, now: float) -> tuple[float, ...]:
        """Return the rate of each count; 0 if nothing was counted lately."""
        recent = [point for point in self._points if point[0] >= now - _SPAN]
        if not recent or recent[0][0] >= now:
            return (0.0,) * self._size
        began, first = recent[0]
        return tuple((last - before) / (now - began) for before, last in zip(first, recent[-1][1]))
