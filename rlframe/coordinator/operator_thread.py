"""The thread in which the coordinator calls the operator, to request workers and to list them."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable
from typing import Any

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.messages import ROLES, WorkerInfo
from rlframe.coordinator.operators import Operator, OperatorError
from rlframe.errors import PeerError, UsageError
from rlframe.retry import backoff

_log = logging.getLogger(__name__)

_BACKOFF = 0.25, 5.0  # shortest and longest pause in seconds between two attempts to reach the operator
_PATIENCE = 5.0  # seconds to wait for the end of all workers, in addition to the operator's grace period
_JOIN = 10.0  # seconds to wait for the end of the thread; each call to an operator takes less time


class OperatorThread:
    """A thread that carries out effects by calls to the operator, and lists the workers a few times per second.

    While the operator cannot be reached, effects stay in the queue and are retried with backoff.

    Args:
        operator: See `rlframe.coordinator.operators`.
        put_event: Function that receives `OperatorAnswered`, `OperatorFailed` and `WorkersEnded`.
    """

    def __init__(self, operator: Operator, put_event: Callable[[Any], None]) -> None:
        self._operator, self._put_event = operator, put_event
        self._effects: collections.deque[Any] = collections.deque()
        self._carry_out: dict[type, Callable[[Any], None]] = {
            ev.ScaleRole: lambda effect: operator.scale(effect.role, effect.count),
            ev.Replace: lambda effect: operator.replace(effect.key),
            ev.Release: lambda effect: operator.release(effect.key),
        }
        self._problems: dict[str, str] = {}
        self._outage = ""
        self._has_answered = False
        self._stops_workers = False  # True if the thread must end all workers before it ends
        self._wake, self._ends, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlframe operator", daemon=True)

    def start(self) -> None:
        """Start the thread. It also lists workers that an earlier coordinator has started."""
        self._thread.start()

    def put(self, effect: Any) -> None:
        """Queue an effect. `EndWorkers` ends all workers in the background, within seconds."""
        if isinstance(effect, ev.EndWorkers):
            self._stops_workers = True
            self._ends.set()
        else:
            self._effects.append(effect)
        self._wake.set()

    def close(self) -> None:
        """End the thread and close the operator. Repeated calls change nothing."""
        self._closed.set()
        self._ends.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN)
        elif self._thread.ident is None:
            self._operator.close()

    def problems(self) -> dict[str, str]:
        """Return the current problems as `{worker_id: sentence}`. The key "" stands for the operator itself."""
        outage = {"": self._outage} if self._outage else {}
        return {**outage, **self._problems}

    def _run(self) -> None:
        waits = backoff(*_BACKOFF)
        while not self._ends.is_set():
            self._wake.clear()
            try:
                live = self._round()
            except Exception as error:
                self._fail(error)
                # Wait for `_ends`, not for `_wake`: a new effect must not shorten the backoff.
                self._ends.wait(next(waits))
            else:
                self._outage, self._has_answered, waits = "", True, backoff(*_BACKOFF)
                self._put_event(ev.OperatorAnswered(tuple(live)))
                self._wake.wait(self._operator.every)
        why = self._stop_all() if self._stops_workers else ""
        self._operator.close()
        if self._stops_workers:
            self._put_event(ev.WorkersEnded(why))

    def _fail(self, error: Exception) -> None:
        """Report an error. A `UsageError` is permanent.

        Before the operator's first reply, every error that is not an outage is permanent too.
        """
        is_outage = isinstance(error, (OperatorError, PeerError, OSError))
        if not is_outage:
            _log.error("The operator raised an unexpected error.", exc_info=error)
        self._outage = why = f"{type(error).__name__}: {error}"
        ends_job = isinstance(error, UsageError) or not (is_outage or self._has_answered)
        self._put_event(ev.OperatorFailed(why, ends_job))

    def _round(self) -> list[WorkerInfo]:
        """Carry out the queued effects. Return the live workers."""
        while self._effects:
            self._carry_out[type(self._effects[0])](self._effects[0])
            self._effects.popleft()
        seen = [worker for worker in self._operator.list_workers() if worker.role in ROLES]
        seen.sort(key=lambda worker: (ROLES.index(worker.role), worker.index, worker.incarnation))
        self._problems = {worker.worker_id: worker.problem for worker in seen if worker.problem}
        return [worker for worker in seen if worker.is_live]

    def _stop_all(self) -> str:
        """End all workers. Return an empty string, or the reason why some workers did not end."""
        why = ""
        for pause in backoff(0.02, self._operator.every, self._operator.grace + _PATIENCE):
            try:
                for role in ROLES:
                    self._operator.scale(role, 0)
                left = self._operator.list_workers()
                for worker in left:
                    self._operator.release(worker.key)
                why = ", ".join(f"{worker.worker_id} ({worker.host})" for worker in left)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
            if not why or self._closed.wait(pause):
                break
        if why:
            _log.warning("Some workers did not end in time: %s", why)
        return why
