"""Steps on their way to a service: gathered while those before them travel."""

from __future__ import annotations

import collections
import logging
import threading
import time
from typing import Any

import numpy as np

from rlframe.errors import StoppedError
from rlframe.interprocess.progress import waiting_for
from rlframe.replay.base import ReplayClosedError
from rlframe.replay.service.server import WriterId
from rlframe.replay.service.stacks import Added, copied, stacked
from rlframe.types import Step, global_env_ids

_MOST_STEPS, _MOST_BYTES = 256, 16 * 2**20  # that are gathered, and sent at once
_WARN_AFTER = 60.0  # seconds that a writer is held back; a learner may compile meanwhile
_LOOK = 0.2  # seconds between two looks at whether to stop

_log = logging.getLogger(__name__)


class Outbox:
    """Sends the steps of one writer in order, by a thread, one message at a time.

    Args:
        service: a `ReplayService`, or what calls one.
        writer: whose steps they are.

    Attributes:
        rank, num_envs, id_bytes: see `Writer`.
        checked: whether a step has the shapes and dtypes that it should.
    """

    def __init__(self, service: Any, writer: WriterId) -> None:
        self._service, self._writer = service, writer
        self.rank, self.num_envs = writer.rank, writer.num_envs
        self.id_bytes = global_env_ids(writer.rank, np.arange(writer.num_envs)).tobytes()
        self.checked = False
        self._moved = threading.Condition()
        self._waiting: collections.deque[Added] = collections.deque()
        self._bytes = 0
        self._last: tuple[Step, Added] | None = None
        self._sending = False
        self._number = 0  # of the first step that waits
        self._why = ""  # the service holds the writer back
        self._error: BaseException | None = None
        self._told_to_stop = self._closed = False
        threading.Thread(target=self._run, name="rlframe replay outbox", daemon=True).start()

    def put(self, env_ids: np.ndarray, step: Step) -> None:
        """Takes a step; waits while too many are there. Raises what became of those before."""
        added = copied(env_ids, step, self._last)
        self._last = step, added
        with self._moved:
            self._check()
            if len(self._waiting) >= _MOST_STEPS or self._bytes >= _MOST_BYTES:
                self._wait(lambda: len(self._waiting) < _MOST_STEPS and self._bytes < _MOST_BYTES)
            self._waiting.append(added)
            self._bytes += added.nbytes
            self._moved.notify_all()

    def flush(self) -> None:
        """Waits until the service has everything."""
        with self._moved:
            self._check()
            if self._waiting or self._sending:
                self._wait(lambda: not self._waiting and not self._sending)

    def end_waits(self) -> None:
        """Ends a `put` that waits, now or later, with StoppedError."""
        with self._moved:
            self._told_to_stop = True
            self._moved.notify_all()

    def close(self) -> None:
        """Sends no more."""
        with self._moved:
            self._closed = True
            self._moved.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise ReplayClosedError("The replay buffer is closed.")

    def _wait(self, is_over: Any) -> None:
        """Waits, holding the lock. Raises as `put`."""
        began, warned = time.monotonic(), False
        with waiting_for("the replay service"):
            while not is_over():
                self._check()
                if self._told_to_stop:
                    raise StoppedError(
                        f"Told to stop while the replay service held back the writer {self._writer.rank}."
                    )
                if not warned and self._why and time.monotonic() > began + _WARN_AFTER:
                    warned = True
                    _log.warning("The replay service holds back the writer %d: %s.", self.rank, self._why)
                self._moved.wait(_LOOK)
        self._check()

    def _run(self) -> None:
        try:
            while True:
                with self._moved:
                    while not self._waiting and not self._closed:
                        self._moved.wait()
                    if self._closed:
                        return
                    steps, self._sending = list(self._waiting), True
                self._send(steps)
                with self._moved:
                    self._sending = False
                    self._moved.notify_all()
        except BaseException as error:
            with self._moved:
                self._error, self._sending = error, False
                self._moved.notify_all()

    def _send(self, steps: list[Added]) -> None:
        """Sends these steps, which are the first that wait, and forgets those that arrived."""
        arrived, self._why = self._service.add(self._writer, self._number, stacked(steps))
        with self._moved:
            for _ in range(arrived - self._number):
                self._bytes -= self._waiting.popleft().nbytes
            self._number = arrived
            self._moved.notify_all()
