"""Fetch the newest parameters of a learner for an inferencer."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from rlframe import handles
from rlframe.errors import PeerError, StoppedError
from rlframe.params.packing import PackedParams
from rlframe.params.source import PackedSource, ParamSource, as_packed_source

_log = logging.getLogger(__name__)

_POLL = 0.2  # seconds that one call waits for newer parameters


class Refresher:
    """Fetches a learner's parameters, once or continuously.

    Args:
        learner: a `ParamSource`, or a handle to a node that is one, which is resolved at the first call.
        known: returns the inferencer's version; -1 if it has none.
        take: called with (version, packed parameters) of a newer version.
        deadline: seconds that a learner in another process may be unreachable.
        stop: ends `follow`, and any wait for the learner.

    Attributes:
        heard_at: when the learner answered last, by `time.monotonic()`; None: never.
        problem: why the learner does not answer; empty if it does.
    """

    def __init__(
        self,
        learner: ParamSource | Any,
        known: Callable[[], int],
        take: Callable[[int, PackedParams], None],
        deadline: float,
        stop: threading.Event,
    ) -> None:
        self._learner_or_handle = learner
        self._known, self._take = known, take
        self._deadline, self._stop = deadline, stop
        self.heard_at: float | None = None
        self.problem = ""

    @functools.cached_property
    def _learner(self) -> PackedSource:
        learner, deadline = self._learner_or_handle, self._deadline
        return as_packed_source(handles.resolve(learner, "learner", deadline=deadline, stop=self._stop))

    def refresh(self) -> None:
        """Take the learner's newest version, if it is another one.

        Raises:
            PeerError: a learner in another process did not answer within `deadline`.
            StoppedError: `stop` was set, or the program ended, while it did not answer.
        """
        version, packed = self._learner.get_packed(self._known())
        self.heard_at, self.problem = time.monotonic(), ""
        if packed is not None:
            self._take(version, packed)

    def wait_for_version(self, known_version: int, timeout: float) -> None:
        """Wait until the learner has a version above `known_version`. Raises as `refresh`."""
        self._learner.wait_for_version(known_version, timeout)

    def follow(self, interval: float, *, waits: bool = False, required: bool = True) -> None:
        """Refresh every `interval` seconds until `stop` is set, or the program ends.

        While the learner is unreachable, the inferencer keeps its version.

        Args:
            waits: wait for each new version instead of for the interval.
            required: raise if there are no parameters and no learner answers.

        Raises:
            PeerError: no learner answered within `deadline`, and there are no parameters.
        """
        while not self._stop.is_set():
            try:
                if waits and self._known() >= 0:
                    self.wait_for_version(self._known(), _POLL)
                self.refresh()
            except StoppedError:
                return
            except PeerError as error:
                known, self.problem = self._known(), str(error)
                if required and known < 0:
                    raise
                newest = f"version {known} of the parameters" if known >= 0 else "its own parameters"
                _log.warning("Inference goes on by %s: %s", newest, error)
            if not waits:
                self._stop.wait(interval)
