"""A coordinator's thread for the operator: it asks for workers, and lists them."""

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

_BACKOFF = 0.25, 5.0  # seconds between two tries to reach it: the first, at most
_PATIENCE = 5.0  # seconds, beside the grace that they are given, for workers to be gone
_JOIN = 10.0  # seconds for the thread to end: longer than any call of an operator takes


class OperatorThread:
    """Carries out the effects that need the operator, and lists its workers a few times a second.

    While the operator cannot be reached, effects are kept and repeated.

    Args:
        operator: see `rlframe.coordinator.operators`.
        put_event: called with `OperatorAnswered`, `OperatorFailed` and `WorkersEnded`.
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
        self._stops_workers = False  # at the end
        self._wake, self._ends, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlframe operator", daemon=True)

    def start(self) -> None:
        """Begin: workers that are there already are adopted."""
        self._thread.start()

    def put(self, effect: Any) -> None:
        """Queue an effect. `EndWorkers` ends all workers, in the background and within seconds."""
        if isinstance(effect, ev.EndWorkers):
            self._stops_workers = True
            self._ends.set()
        else:
            self._effects.append(effect)
        self._wake.set()

    def close(self) -> None:
        """End the thread, and close the operator. May be repeated."""
        self._closed.set()
        self._ends.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN)
        elif self._thread.ident is None:
            self._operator.close()

    def problems(self) -> dict[str, str]:
        """Return the present problems, a sentence each: by worker_id, or "" for the operator itself."""
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
                # Not shorter after a wake-up: an operator that does not answer is not asked sooner.
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
        """Report an error. One that is no outage ends the job if another try would end in the same way."""
        is_outage = isinstance(error, (OperatorError, PeerError, OSError))
        if not is_outage:
            _log.error("The operator raised what is no outage.", exc_info=error)
        self._outage = why = f"{type(error).__name__}: {error}"
        ends_job = isinstance(error, UsageError) or not (is_outage or self._has_answered)
        self._put_event(ev.OperatorFailed(why, ends_job))

    def _round(self) -> list[WorkerInfo]:
        """Carry out the effects; return the workers that live and are wanted."""
        while self._effects:
            self._carry_out[type(self._effects[0])](self._effects[0])
            self._effects.popleft()
        seen = [worker for worker in self._operator.list_workers() if worker.role in ROLES]
        seen.sort(key=lambda worker: (ROLES.index(worker.role), worker.index, worker.incarnation))
        self._problems = {worker.worker_id: worker.problem for worker in seen if worker.problem}
        return [worker for worker in seen if worker.is_live]

    def _stop_all(self) -> str:
        """End all workers; return why that could not be done, empty if it was."""
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
            _log.warning("Workers that could not be ended in time: %s", why)
        return why
