"""What an actor waits for before a step: a budget of steps, and, on-policy, newer parameters for each unroll."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from rlframe.types import ReplaySpec, Sequence

_log = logging.getLogger(__name__)

_POLL = 0.2  # seconds of one request for a version, or of one wait for budget: a stop takes no longer than this
_RESTARTED = 1.0  # seconds after which a version older than the last one means that the learner was restarted


class UnrollGate:
    """Opens for an unroll once there is a version that is new enough when the learner learns from it; then closes.

    A learner that takes one unroll for each version learns from this one at the version after that of the previous
    unroll. The version may never come (a replay server lost the unroll, or the learner was restarted). So the gate
    opens after three times the `lapse_after` of the spec, and the next unroll uses the newest parameters.

    Args:
        spec: the replay's; its `max_staleness` is not None.
    """

    def __init__(self, spec: ReplaySpec) -> None:
        assert isinstance(spec.item, Sequence) and spec.max_staleness is not None
        self._length, self._max_staleness = spec.item.length, spec.max_staleness
        self._patience = 3 * spec.lapse_after  # longer than a learner waits for other actors
        self._steps = 0  # of the unroll
        self._version = -1  # that acted in the unroll's first step
        self._learned_at = -1  # the version at which the learner learns from the unroll
        self._is_open = True
        self._waited = 0.0  # seconds, for the next unroll

    def count_step(self, version: int) -> None:
        """Count a step that `version` acted in."""
        if self._steps == 0:
            # The first step's version counts: if the learner went on without this actor meanwhile, the unroll is old.
            self._version, self._learned_at = version, max(version, self._learned_at + 1)
        self._steps = (self._steps + 1) % self._length
        self._is_open = self._steps > 0 or self._version > self.too_old

    @property
    def is_closed(self) -> bool:
        """True if the next step must wait: call `wait_until_open` first."""
        return not self._is_open

    @property
    def too_old(self) -> int:
        """The newest version that is too old for the next unroll."""
        return self._learned_at - self._max_staleness

    def open_for(self, version: int) -> None:
        """Open if `version` is new enough for the next unroll."""
        self._is_open = self._is_open or version > self.too_old

    def wait_until_open(self, inferencer: Any, stop: threading.Event, until: float = math.inf) -> int:
        """Wait until the next unroll may begin, or `stop` is set. Return the newest known version.

        It also returns at `until` (of `time.monotonic()`). Then the gate may still be closed: call this again.
        """
        began, version, before = time.monotonic(), -1, self._waited
        while not stop.is_set():
            version = inferencer.wait_for_version(self.too_old, min(_POLL, max(0.0, until - time.monotonic())))
            if version > self.too_old:
                break
            now = time.monotonic()
            self._waited = before + now - began
            if self._waited > self._patience or (version < self._version and self._waited > _RESTARTED):
                _log.warning("No version after %d came within %.1f s: acting with it again.", version, self._waited)
                self._learned_at = version - 1
                break
            if now >= until:
                return version
        self._is_open, self._waited = True, 0.0
        return version


class StepBudget:
    """The environment steps that `Actor.run` may take in all, which another thread may raise.

    Args:
        steps: allowed at first.
        num_envs: the most steps that one step of the Actor takes.
        taken: returns how many were taken.
    """

    def __init__(self, steps: float, num_envs: int, taken: Callable[[], int]) -> None:
        self._steps, self._num_envs, self._taken = steps, num_envs, taken
        self._at_most = 0  # how many can have been taken
        self._changed = threading.Event()

    def allow(self, steps: float) -> None:
        """Allow so many steps in all. Any thread may call it."""
        self._steps = steps
        self._changed.set()

    def take(self) -> bool:
        """Count the next step of all environments. Return False if the budget does not allow it.

        The count may be too high: an environment that resets takes no step. When it reaches the budget, it is corrected
        by `taken`, which takes longer to compute.
        """
        self._at_most += self._num_envs
        if self._at_most >= self._steps:
            self._at_most = self._taken()
        return self._at_most < self._steps

    def wait(self) -> None:
        """Wait a moment for more budget, if it is used up."""
        self._changed.clear()
        if self._taken() >= self._steps:
            self._changed.wait(_POLL)
