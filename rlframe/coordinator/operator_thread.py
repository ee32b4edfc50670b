"""The operator's side of a coordinator: what is wanted of it, in order, and what it has, again and again."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, cast

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.messages import Role
from rlframe.coordinator.operators.base import Operator, OperatorError, WorkerInfo

_log = logging.getLogger(__name__)

_LIST_EVERY = 0.25  # seconds
_BACKOFF, _LONGEST_BACKOFF = 0.25, 5.0  # seconds between two tries to reach it
_DISCONNECT_WITHIN = 10.0  # seconds of tries


class OperatorThread:
    """Says to an operator what the machine wants, and to the machine what the operator has.

    What the operator did not take, because it could not be reached, is said again until it does.

    Args:
        operator: see `rlframe.coordinator.operators`.
        happened: is called with `OperatorAnswered`, `OperatorFailed`, `OperatorBroke` and `Disconnected`.

    Attributes:
        problems: what the operator says is wrong, by worker_id, or "" for all of it.
    """

    def __init__(self, operator: Operator, happened: Callable[[Any], None]) -> None:
        self._operator, self._happened = operator, happened
        self._wanted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stop = threading.Event()
        self.problems: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name="rlframe operator", daemon=True)

    @property
    def kind(self) -> str:
        """What it is called."""
        return type(self._operator).__name__

    def start(self) -> None:
        """Begins to take effects."""
        self._thread.start()

    def put(self, effect: Any) -> None:
        """Takes an effect, and returns at once."""
        self._wanted.put(effect)

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_DISCONNECT_WITHIN)

    def _run(self) -> None:
        is_connected, backoff = False, _BACKOFF
        effect: Any = None
        while not self._stop.is_set():
            if effect is None:
                try:
                    effect = self._wanted.get(timeout=_LIST_EVERY if is_connected else 1.0)
                except queue.Empty:
                    effect = None
            try:
                if isinstance(effect, ev.Disconnect):
                    self._disconnect()
                    return
                if isinstance(effect, ev.Connect):
                    self._answer(self._operator.connect())
                    is_connected = True
                elif effect is not None:
                    self._say(effect)
                elif is_connected:
                    self._answer(self._operator.list())
                effect, backoff = None, _BACKOFF
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                is_outage = isinstance(error, (OperatorError, OSError))
                if not is_outage:
                    _log.error("The operator raised what is no outage.", exc_info=error)
                self._happened(ev.OperatorFailed(why) if is_outage else ev.OperatorBroke(why))
                self._stop.wait(backoff)
                backoff = min(2 * backoff, _LONGEST_BACKOFF)
                if self._is_to_disconnect():
                    effect = ev.Disconnect()

    def _is_to_disconnect(self) -> bool:
        """Whether the job is over, so that what was not taken is of no use any more."""
        waiting = []
        while not self._wanted.empty():
            waiting.append(self._wanted.get())
        for effect in waiting:
            if isinstance(effect, ev.Disconnect):
                return True
        for effect in waiting:
            self._wanted.put(effect)
        return False

    def _say(self, effect: Any) -> None:
        if isinstance(effect, ev.Request):
            self._operator.request(effect.role, effect.count)
        elif isinstance(effect, ev.ReportFailed):
            self._operator.report_failed([(effect.worker_id, effect.incarnation)])
        elif isinstance(effect, ev.Release):
            self._operator.release([(effect.worker_id, effect.incarnation)])

    def _answer(self, workers: list[WorkerInfo]) -> None:
        self.problems = self._operator.problems()
        self._happened(ev.OperatorAnswered(tuple(_seen(info) for info in workers)))

    def _disconnect(self) -> None:
        deadline, why = time.monotonic() + _DISCONNECT_WITHIN, ""
        while True:
            try:
                self._operator.disconnect()
                why = ""
                break
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                if time.monotonic() > deadline or self._stop.wait(_BACKOFF):
                    break
        self._happened(ev.Disconnected(why))


def _seen(info: WorkerInfo) -> ev.Seen:
    role = cast(Role, info.role)
    return ev.Seen(info.worker_id, role, info.index, info.incarnation, info.address, info.host, info.pid, info.stays)
