"""Refreshing: the newest parameters of a learner, taken over beside the calls that they answer."""

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

_POLL = 0.2  # seconds for which the learner keeps the question for newer parameters


class Refresher:
    """Asks a learner for parameters: by shared memory where they lie there, else by calls.

    Args:
        learner: a `ParamSource`, or a handle to a node that is one, which is looked up at the first question.
        known: gives the version that is known; -1 is none.
        take: is called with (version, packed parameters) of another one.
        deadline: seconds that a learner in another process may be out of reach.
        stop: ends the waiting for it, and `follow`.

    Attributes:
        heard_at: when the learner answered last, by `time.monotonic()`; None: never.
        problem: why it does not answer, for `follow`; empty while it does.
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
        """Takes over the learner's parameters if there is a newer version.

        Raises:
            PeerError: the learner is in another process, and did not answer for `deadline`.
            StoppedError: `stop` was set, or the program ended, while it did not answer.
        """
        version, packed = self._learner.get_packed(self._known())
        self.heard_at, self.problem = time.monotonic(), ""
        if packed is not None:
            self._take(version, packed)

    def wait_for_version(self, known_version: int, timeout: float) -> None:
        """Waits for the learner to have a version above `known_version`. Raises as `refresh`."""
        self._learner.wait_for_version(known_version, timeout)

    def follow(self, interval: float, *, waits: bool = False, required: bool = True) -> None:
        """Refreshes every `interval` seconds until `stop` is set, or the program ends.

        While the learner is out of reach, the newest that came stay.

        Args:
            waits: has the learner say when there are newer ones, in place of the interval.
            required: there are no parameters but the learner's.

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
