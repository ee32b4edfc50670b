"""A driver of an operator, through the coordinator's `OperatorThread`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.messages import Role, WorkerInfo, WorkerKey
from rlframe.coordinator.operators import Operator, OperatorError
from rlframe.coordinator.threads import OperatorThread
from tests.waiting import wait_until


class OperatorDriver:
    """Calls an operator through an `OperatorThread`, and collects the events of the thread."""

    def __init__(self, operator: Operator) -> None:
        self.events: list[Any] = []
        self._thread = OperatorThread(operator, self.events.append)
        self.problems = self._thread.problems
        self._is_gone = False

    def connect(self) -> list[WorkerInfo]:
        """Start the thread, and return the workers in the first list."""
        self._thread.start()
        return self._workers(1)

    def list_workers(self) -> list[WorkerInfo]:
        """Wait until the thread has run one full cycle. Then return the live workers."""
        return self._workers(len(self.events) + 2)

    def scale(self, role: Role, n: int) -> None:
        self._thread.put(ev.ScaleRole(role, n))

    def replace_workers(self, keys: Iterable[WorkerKey]) -> None:
        for key in keys:
            self._thread.put(ev.Replace(key))

    def release(self, keys: Iterable[WorkerKey]) -> None:
        for key in keys:
            self._thread.put(ev.Release(key))

    def disconnect(self, end_workers: bool = True) -> None:
        """End the thread. Also end the workers unless `end_workers` is False. Repeated calls change nothing."""
        if end_workers and not self._is_gone:
            self._thread.put(ev.EndWorkers())
            wait_until(lambda: isinstance(self.events[-1], ev.WorkersEnded))
        self._thread.close()
        self._is_gone = True

    def _workers(self, number: int) -> list[WorkerInfo]:
        wait_until(lambda: len(self.events) >= number)
        newest = self.events[-1]
        if isinstance(newest, ev.OperatorFailed):
            raise OperatorError(newest.why)
        assert isinstance(newest, ev.OperatorAnswered), newest
        return list(newest.workers)
