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
from rlframe.replay.service.stacks import Stage
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
        most_steps: that may be on their way; None: 256. Samples are owed for those too.

    Attributes:
        rank, num_envs, id_bytes: see `Writer`.
        checked: whether a step has the shapes and dtypes that it should.
    """

    def __init__(self, service: Any, writer: WriterId, most_steps: int | None = None) -> None:
        self._service, self._writer = service, writer
        self.rank, self.num_envs = writer.rank, writer.num_envs
        self.id_bytes = global_env_ids(writer.rank, np.arange(writer.num_envs)).tobytes()
        self._most_steps = _MOST_STEPS if most_steps is None else min(most_steps, _MOST_STEPS)
        self.checked = False
        self._moved = threading.Condition()
        self._stages: collections.deque[Stage] = collections.deque()  # of steps that have yet to arrive
        self._waiting = self._bytes = 0  # these steps
        self._number = 0  # of the first one
        self._why = ""  # the service holds the writer back
        self._error: BaseException | None = None
        self._told_to_stop = self._closed = False
        threading.Thread(target=self._run, name="rlframe replay outbox", daemon=True).start()

    def put(self, env_ids: np.ndarray, step: Step) -> None:
        """Takes a step; waits while too many are there, or one is held back. Raises what became of those before."""
        with self._moved:
            self._check()
            if not self._takes_more():
                self._wait(self._takes_more)
            if not self._stages or not self._stages[-1].takes(env_ids, step):
                self._stages.append(Stage(env_ids, step, self._stages[-1] if self._stages else None))
            stage = self._stages[-1]
            stage.put(step)
            self._waiting += 1
            self._bytes += stage.nbytes
            if self._waiting == 1:
                self._moved.notify_all()

    def flush(self) -> None:
        """Waits until the service has everything."""
        with self._moved:
            self._check()
            if self._waiting:
                self._wait(lambda: not self._waiting)

    def settle(self) -> None:
        """Waits until the service has everything, or holds the writer back."""
        with self._moved:
            self._check()
            if self._waiting:
                self._wait(lambda: not self._waiting or bool(self._why))

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

    def _takes_more(self) -> bool:
        return not self._why and self._waiting < self._most_steps and self._bytes < _MOST_BYTES

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
                    _log.warning(
                        "The replay service holds back the writer %d: %s. (A thread that both adds and samples needs a "
                        "larger capacity or run_ahead.)",
                        self.rank,
                        self._why,
                    )
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
                    stacks = [stage.stack(stage.count) for stage in self._stages if stage.count > stage.arrived]
                self._forget(*self._service.add(self._writer, self._number, stacks, bool(self._why)))
        except BaseException as error:
            with self._moved:
                self._error = error
                self._moved.notify_all()

    def _forget(self, number: int, why: str) -> None:
        """The steps before this number have arrived, and `why` the next one is held back."""
        with self._moved:
            self._why = why
            while self._number < number:
                stage = self._stages[0]
                count = min(number - self._number, stage.count - stage.arrived)
                stage.arrived += count
                self._number += count
                self._waiting -= count
                self._bytes -= count * stage.nbytes
                if stage.arrived == stage.count and len(self._stages) > 1:
                    self._stages.popleft()
            self._moved.notify_all()
