"""The operator's side of a coordinator: it lists, starts and stops workers, in rounds, in a thread of its own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.messages import ROLES, Role, WorkerInfo, WorkerKey
from rlframe.coordinator.operators.base import Operator, OperatorError
from rlframe.coordinator.operators.reconciler import Backoff, Reconciler
from rlframe.interprocess.files import write_atomically

_log = logging.getLogger(__name__)

_BACKOFF, _LONGEST_BACKOFF = 0.25, 5.0  # seconds between two tries to reach it
_PATIENCE = 5.0  # seconds, beside the grace that they are given, for workers to be gone
_JOIN = 10.0  # seconds for the thread to end: longer than any call of an operator takes


class OperatorThread:
    """Makes what there is like what is wanted: in each round it lists, compares (`Reconciler`) and acts.

    What is wanted may be said by any thread, and again; it is kept while the operator cannot be reached.

    Args:
        operator: see `rlframe.coordinator.operators`.
        state_dir: a directory to keep the incarnations in, across restarts.
        happened: is called with `OperatorAnswered`, `OperatorFailed`, `OperatorBroke` and `Disconnected`.
        backoff: between the deaths of a worker that does not stay up.
    """

    def __init__(
        self,
        operator: Operator,
        state_dir: str | os.PathLike[str],
        happened: Callable[[Any], None],
        backoff: Backoff | None = None,
    ) -> None:
        self._operator, self._happened = operator, happened
        self._incarnations = _Incarnations(pathlib.Path(state_dir) / "incarnations.json")
        self._reconciler = Reconciler(self._incarnations.read(), backoff or Backoff(), operator.grace)
        self._asked: queue.SimpleQueue[Callable[[float], None]] = queue.SimpleQueue()  # at a time, of the reconciler
        self._problems: dict[str, str] = {}
        self._seen: list[WorkerInfo] = []
        self._outage = ""
        self._has_answered = False
        self._stops_workers = False  # at the end
        self._wake, self._ends, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlframe operator", daemon=True)

    def start(self) -> None:
        """Begins: workers that are there already are adopted."""
        self._thread.start()

    def request(self, role: Role, n: int) -> None:
        """Keep `n` workers of this role alive from now on. Ends none where there are more; `release` does."""
        self._ask(lambda now: self._reconciler.request(role, n))

    def report_failed(self, key: WorkerKey) -> None:
        """Ends this worker at once, whatever it is at, and replaces it: the same index, the next incarnation."""
        self._ask(lambda now: self._reconciler.report_failed(key, now))

    def release(self, key: WorkerKey) -> None:
        """Ends this worker for good, giving it the time to do it itself.

        Where that leaves fewer than are wanted, others are started: `request` the lower number first.
        """
        self._ask(lambda now: self._reconciler.release(key, now))

    def _ask(self, what: Callable[[float], None]) -> None:
        self._asked.put(what)
        self._wake.set()

    def disconnect(self) -> None:
        """Ends all workers, in the background and within seconds; `Disconnected` comes of it."""
        self._stops_workers = True
        self._ends.set()
        self._wake.set()

    def close(self) -> None:
        """Ends the thread, and lets the workers be. May be repeated."""
        self._closed.set()
        self._ends.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN)

    def problems(self) -> dict[str, str]:
        """Return what is wrong now, in a sentence each: by worker_id, or "" for the operator itself."""
        outage = {"": self._outage} if self._outage else {}
        return {**outage, **self._problems}

    def _run(self) -> None:
        failures = 0
        while not self._ends.is_set():
            self._wake.clear()
            try:
                live = self._round()
            except Exception as error:
                self._fail(error)
                # A wake-up is no reason to ask sooner somebody who does not answer.
                self._ends.wait(min(_BACKOFF * 2 ** min(failures, 10), _LONGEST_BACKOFF))
                failures += 1
            else:
                self._outage, self._has_answered, failures = "", True, 0
                self._happened(ev.OperatorAnswered(tuple(live)))
                self._wake.wait(self._until_due())
        why = self._stop_all() if self._stops_workers else ""
        self._operator.close()
        if self._stops_workers:
            self._happened(ev.Disconnected(why))

    def _fail(self, error: Exception) -> None:
        """Tell of an error. One that is no outage ends the job, unless the operator has answered before."""
        is_outage = isinstance(error, (OperatorError, OSError))
        if not is_outage:
            _log.error("The operator raised what is no outage.", exc_info=error)
        self._outage = why = f"{type(error).__name__}: {error}"
        self._happened(ev.OperatorFailed(why) if is_outage or self._has_answered else ev.OperatorBroke(why))

    def _until_due(self) -> float:
        due = self._reconciler.next_due()
        every = self._operator.every
        return every if due is None else min(every, max(0.0, due - time.monotonic()))

    def _round(self) -> list[WorkerInfo]:
        """Lists, starts and stops; returns the workers that live and are wanted."""
        while not self._asked.empty():
            self._asked.get()(time.monotonic())
        seen = [worker for worker in self._operator.list() if worker.role in ROLES]
        seen.sort(key=lambda worker: (ROLES.index(worker.role), worker.index, worker.incarnation))
        self._seen = seen
        live = [worker for worker in seen if not worker.has_ended]
        starts, stops = self._reconciler.plan(seen, time.monotonic())
        self._incarnations.write(self._reconciler.incarnations())  # before anything is started
        for worker, kill in stops:
            self._operator.stop(worker, kill)
        for worker in starts:
            if self._ends.is_set():
                break
            try:
                self._operator.start(worker)
            except OperatorError as error:
                self._reconciler.failed_to_start(worker, time.monotonic(), str(error))
                continue
            self._reconciler.started(worker, time.monotonic())
            self._wake.set()  # to list it
        self._problems = self._reconciler.problems()
        return [worker for worker in live if self._reconciler.is_wanted(worker.key)]

    def _stop_all(self) -> str:
        """Ends all workers; returns why that could not be done, empty where it was."""
        self._reconciler.release_all(time.monotonic())
        deadline, pause = time.monotonic() + self._operator.grace + _PATIENCE, 0.02
        while True:
            try:
                self._round()
                why = ", ".join(f"{worker.worker_id} ({worker.host})" for worker in self._seen)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
            if not why or time.monotonic() > deadline or self._closed.wait(pause):
                break
            pause = min(2 * pause, self._operator.every)
        if why:
            _log.warning("Workers that could not be ended in time: %s", why)
        return why


class _Incarnations:
    """The newest incarnation of each worker, on disk."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._written: dict[str, int] | None = None

    def read(self) -> dict[str, int]:
        with contextlib.suppress(FileNotFoundError):
            self._written = json.loads(self._path.read_text())
        return dict(self._written or {})

    def write(self, incarnations: dict[str, int]) -> None:
        if incarnations == self._written:
            return
        try:
            write_atomically(self._path, json.dumps(incarnations), parents=True)
        except OSError as error:
            raise OperatorError(f"{self._path} cannot be written: {error}. Nothing is started without it.") from error
        self._written = dict(incarnations)
