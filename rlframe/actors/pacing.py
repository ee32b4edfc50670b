"""Waits of an actor before a step: for newer parameters (`UnrollGate`), or for a higher step budget (`StepBudget`)."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from rlframe.types import ReplaySpec, Sequence

_log = logging.getLogger(__name__)

_POLL = 0.2  # maximum seconds of one wait; a stop request takes effect within this time
_RESTARTED = 1.0  # If the version stays lower than before for this time (in seconds), the learner was restarted.


class UnrollGate:
    """Makes the actor wait before each unroll until its parameters are new enough.

    The gate closes after each unroll. The learner uses one unroll per version, so it learns from the next unroll one
    version later. The gate waits for parameters that are at most `max_staleness` versions old at that time.
    They never arrive if a replay server lost the unroll, or if the learner was restarted. Therefore the gate opens
    after 3 * `spec.lapse_after` seconds, and the next unroll uses the newest parameters.

    Args:
        spec: spec of the replay, with a `max_staleness`.

    Attributes:
        is_closed: True if the next step must wait: call `wait_until_open` first.
    """

    def __init__(self, spec: ReplaySpec) -> None:
        assert isinstance(spec.item, Sequence) and spec.max_staleness is not None
        self._length, self._max_staleness = spec.item.length, spec.max_staleness
        self._patience = 3 * spec.lapse_after  # maximum wait in seconds; a learner waits less for a missing actor
        self._steps = 0  # steps taken in the current unroll
        self._version = -1  # parameter version that acted in the first step of the unroll
        self._learned_at = -1  # parameter version of the learner when it learns from the unroll
        self.is_closed = False
        self._waited = 0.0  # seconds that the actor has waited for the next unroll

    def count_step(self, version: int) -> None:
        """Count a step that used the parameters of `version`."""
        if self._steps == 0:
            # The first step has the oldest version of the unroll.
            # If the learner has continued without this actor, `version` is larger than `_learned_at` + 1.
            self._version, self._learned_at = version, max(version, self._learned_at + 1)
        self._steps = (self._steps + 1) % self._length
        self.is_closed = self._steps == 0 and self._version <= self.too_old

    @property
    def too_old(self) -> int:
        """The newest version that is too old to act in the next unroll."""
        return self._learned_at - self._max_staleness

    def open_for(self, version: int) -> None:
        """Open the gate if `version` is new enough for the next unroll."""
        self.is_closed = self.is_closed and version <= self.too_old

    def wait_until_open(self, inferencer: Any, stop: threading.Event, until: float = math.inf) -> int:
        """Wait until the next unroll may start or `stop` is set. Return the newest known version.

        The wait also ends at the time `until` (of `time.monotonic()`). If the gate is still closed then, call this
        method again.
        """
        began, version, before = time.monotonic(), -1, self._waited
        while not stop.is_set():
            version = inferencer.wait_for_version(self.too_old, min(_POLL, max(0.0, until - time.monotonic())))
            if version > self.too_old:
                break
            now = time.monotonic()
            self._waited = before + now - began
            if self._waited > self._patience or (version < self._version and self._waited > _RESTARTED):
                _log.warning(
                    "No version after %d arrived within %.1f s. Continuing without a newer version.",
                    version,
                    self._waited,
                )
                self._learned_at = version - 1
                break
            if now >= until:
                return version
        self.is_closed, self._waited = False, 0.0
        return version


class StepBudget:
    """The total number of environment steps that `Actor.run` may take. Another thread may raise it.

    Args:
        steps: initial budget.
        num_envs: maximum number of environment steps in one step of the Actor.
        taken: a function that returns the number of steps taken so far.
    """

    def __init__(self, steps: float, num_envs: int, taken: Callable[[], int]) -> None:
        self._steps, self._num_envs, self._taken = steps, num_envs, taken
        self._at_most = 0  # upper bound of the number of steps taken
        self._changed = threading.Event()

    def allow(self, steps: float) -> None:
        """Set the budget to `steps` in total. Any thread may call it."""
        self._steps = steps
        self._changed.set()

    def take(self) -> bool:
        """Add one step of every environment to the count. Return False if the budget is used up.

        The count may be too high, because an environment that resets takes no step. At the limit, the count is
        replaced with the exact value of `taken`, which is slower to compute.
        """
        self._at_most += self._num_envs
        if self._at_most >= self._steps:
            self._at_most = self._taken()
        return self._at_most < self._steps

    def wait(self) -> None:
        """If the budget is used up, wait up to 0.2 s for a higher budget."""
        self._changed.clear()
        if self._taken() >= self._steps:
            self._changed.wait(_POLL)
