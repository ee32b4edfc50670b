"""The pace of on-policy acting: an unroll for each version of the parameters, then the next version."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any

from rlframe.types import ReplaySpec, Sequence

_log = logging.getLogger(__name__)

_POLL = 0.2  # seconds that an inferencer is asked to wait at once: a stop waits for no longer than this
_ANEW = 1.0  # seconds after which versions that are older than what acted before are taken for a learner's new start


class Pace:
    """Has a lane wait, before each unroll, for the version that keeps it from being too old when it is learned from.

    A learner that takes one unroll for each version learns from this one at the version after that of the unroll
    before. What is waited for may never come (a replay server that lost the unroll, a learner that began anew). So
    nobody waits for longer than three times the `lapse_after` of the spec, and then acts on by the newest parameters.

    Args:
        spec: of the replay; its `max_staleness` is not None.
    """

    def __init__(self, spec: ReplaySpec) -> None:
        assert isinstance(spec.item, Sequence) and spec.max_staleness is not None
        self._length, self._max_staleness = spec.item.length, spec.max_staleness
        self._patience = 3 * spec.lapse_after  # longer than a learner waits for other actors
        self._steps = 0  # of the unroll
        self._version = self._learned_at = -1  # that acted in the unroll's first step, and that will learn from it
        self._free = True  # to take the next step
        self._waited = 0.0  # seconds, for the next unroll

    def acted(self, version: int) -> None:
        """Notes a step, and the version that acted in it."""
        if self._steps == 0:
            # Of its first step: where the learner went on meanwhile, without this actor, the unroll counts as old.
            self._version, self._learned_at = version, max(version, self._learned_at + 1)
        self._steps = (self._steps + 1) % self._length
        self._free = self._steps > 0 or self._version > self.too_old

    @property
    def waits(self) -> bool:
        """Whether `wait` comes before the next step."""
        return not self._free

    @property
    def too_old(self) -> int:
        """The newest version by which the next unroll would be too old."""
        return self._learned_at - self._max_staleness

    def release(self, version: int) -> None:
        """Lets the next unroll begin by `version`, where that is not too old for it."""
        self._free = self._free or version > self.too_old

    def wait(self, inferencer: Any, stop: threading.Event, until: float = math.inf) -> int:
        """Returns when the next unroll may begin, or `stop` is set; and the newest version that is known then.

        At `until`, by `time.monotonic()`, it returns too; then it still `waits`, and is to be called again.
        """
        began, version, before = time.monotonic(), -1, self._waited
        while not stop.is_set():
            version = inferencer.wait_for_version(self.too_old, min(_POLL, max(0.0, until - time.monotonic())))
            if version > self.too_old:
                break
            now = time.monotonic()
            self._waited = before + now - began
            if self._waited > self._patience or (version < self._version and self._waited > _ANEW):
                _log.warning("No version after %d came within %.1f s: acting on by it.", version, self._waited)
                self._learned_at = version - 1
                break
            if now >= until:
                return version
        self._free, self._waited = True, 0.0
        return version
