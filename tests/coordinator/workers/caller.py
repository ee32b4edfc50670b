"""Numbered calls to a worker, like those of a coordinator, repeated until the worker has a reply."""

from __future__ import annotations

import time
from typing import Any

from rlframe.coordinator.messages import Header, NotReady
from rlframe.coordinator.workers.task_worker import TaskWorker

PATIENCE = 60.0  # seconds


class Caller:
    """A caller of `worker` for one task."""

    def __init__(self, worker: TaskWorker, task_id: str, seq: int = 0, attempt: int = 0) -> None:
        self.worker, self.task_id, self.attempt, self.seq = worker, task_id, attempt, seq

    def header(self) -> Header:
        """Return the header of the next call."""
        self.seq += 1
        return Header(self.task_id, self.attempt, self.worker.worker_id, self.worker.incarnation, self.seq)

    def call_once(self, call: str, *args: Any) -> Any:
        """Make the next call once, and return its reply."""
        return getattr(self.worker, call)(self.header(), *args)

    def until_done(self, call: str, *args: Any, later: Any = None) -> Any:
        """Make the next call until the reply is not NotReady. Call `later()` after the first of these calls."""
        header = self.header()
        if later is not None:
            getattr(self.worker, call)(header, *args)
            later()
        return self._until_done(call, args, header)

    def repeat_until_done(self, call: str, argument: Any, header: Header) -> Any:
        """Repeat a call with the given header until the reply is not NotReady."""
        return self._until_done(call, (argument,), header)

    def _until_done(self, call: str, args: Any, header: Header) -> Any:
        deadline = time.monotonic() + PATIENCE
        while isinstance(reply := getattr(self.worker, call)(header, *args), NotReady):
            assert time.monotonic() < deadline, f"{call} was not done within {PATIENCE:g} s: {reply}"
        return reply
