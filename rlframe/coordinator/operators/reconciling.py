"""An operator that makes what there is like what is wanted, again and again, in a thread of its own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from rlframe.coordinator.operators.base import Operator, OperatorError, WorkerInfo, WorkerKey
from rlframe.coordinator.operators.reconcile import Backoff, End, Health, Plan, Reconciler, Seen, Start
from rlframe.errors import UsageError, suggest
from rlframe.interprocess.files import write_atomically

_JOIN = 10.0  # seconds for the thread to end: longer than any call of a backend takes

_log = logging.getLogger(__name__)


class Backend(Protocol):
    """What differs between processes, Pods and actors. Its methods are called by one thread at a time.

    Each may raise `OperatorError`, and is called again then; none takes longer than a few seconds.
    """

    def observe(self) -> list[Seen]:
        """All that there is now, whoever started it."""

    def start(self, start: Start) -> None:
        """Starts a worker; where it is there already, does nothing."""

    def end(self, end: End) -> None:
        """Has a worker end, or ends it, or clears away what is left of it. Repeated until it is not seen any more."""

    def close(self) -> None:
        """Lets go of what it holds in this process."""


class ReconcilingOperator(Operator):
    """Looks, compares and acts, in rounds; a call of `Operator` changes what is wanted, and wakes it.

    Args:
        make_backend: what starts and ends workers; called once, by `connect`.
        state_dir: a directory to keep the incarnations in, across restarts.
        roles: that can be requested.
        every: seconds between two rounds where nothing else happens.
        backoff: between the deaths of a worker that does not stay up.
        grace: seconds that a released worker is given to end by itself.
    """

    def __init__(
        self,
        make_backend: Callable[[], Backend],
        state_dir: str | os.PathLike[str],
        roles: Sequence[str],
        every: float,
        backoff: Backoff | None = None,
        grace: float = 8.0,
    ) -> None:
        self._make_backend, self._roles, self._every, self._grace = make_backend, tuple(roles), every, grace
        self._incarnations = _Incarnations(pathlib.Path(state_dir) / "incarnations.json")
        self._reconciler = Reconciler(self._incarnations.read(), backoff or Backoff(), grace)
        self._lock = threading.Lock()  # of the reconciler, and what was seen
        self._round = threading.Lock()  # of the backend
        self._backend: Backend | None = None
        self._seen: list[Seen] = []
        self._outage = ""
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def connect(self) -> list[WorkerInfo]:
        """See `Operator.connect`."""
        with self._round:
            if self._backend is None:
                self._backend = self._make_backend()
            self._observe(self._backend)
        if self._thread is None:
            self._closed.clear()
            self._thread = threading.Thread(target=self._run, name="rlframe operator", daemon=True)
            self._thread.start()
        return self.list()

    def request(self, role: str, n: int) -> None:
        """See `Operator.request`."""
        if role not in self._roles:
            raise UsageError(
                f"There are no workers of the role {role!r}; there are {', '.join(self._roles)}."
                f"{suggest(role, self._roles)}"
            )
        if n < 0:
            raise UsageError(f"{n} workers of the role {role!r} cannot be wanted; it must be 0 or more.")
        with self._lock:
            self._reconciler.request(role, n)
        self._wake.set()

    def list(self) -> list[WorkerInfo]:
        """See `Operator.list`."""
        with self._lock:
            if self._outage:
                raise OperatorError(self._outage)
            infos = [one.info for one in self._seen if one.health is Health.LIVE]
            infos = [info for info in infos if self._reconciler.is_wanted(info.key)]
        return sorted(infos, key=lambda info: (self._roles.index(info.role), info.index))

    def report_failed(self, ids: Iterable[WorkerKey]) -> None:
        """See `Operator.report_failed`."""
        with self._lock:
            for key in ids:
                self._reconciler.report_failed((key[0], key[1]), time.monotonic())
        self._wake.set()

    def release(self, ids: Iterable[WorkerKey]) -> None:
        """See `Operator.release`."""
        with self._lock:
            for key in ids:
                self._reconciler.release((key[0], key[1]), time.monotonic())
        self._wake.set()

    def problems(self) -> dict[str, str]:
        """See `Operator.problems`."""
        with self._lock:
            outage = {"": self._outage} if self._outage else {}
            return {**outage, **self._reconciler.problems()}

    def disconnect(self, end_workers: bool = True) -> None:
        """See `Operator.disconnect`. Ends them within the grace that they are given and a few seconds."""
        self._closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_JOIN)
            self._thread = None
        backend, self._backend = self._backend, None
        if backend is None:
            return
        try:
            if end_workers:
                self._end_all(backend)
        finally:
            backend.close()

    def _end_all(self, backend: Backend) -> None:
        with self._lock:
            self._reconciler.release_all(time.monotonic())
        deadline = time.monotonic() + self._grace + _JOIN / 2
        pause, outage = 0.02, ""
        while time.monotonic() < deadline:
            try:
                outage = ""
                with self._round:
                    if not self._one_round(backend):
                        return
            except OperatorError as error:
                outage = f" {error}"
            time.sleep(pause)
            pause = min(2 * pause, self._every)
        with self._lock:
            left = ", ".join(f"{one.info.worker_id} ({one.info.host})" for one in self._seen)
        _log.warning("Workers that could not be ended in time: %s.%s", left or "unknown", outage)

    def _run(self) -> None:
        failures = 0
        while not self._closed.is_set():
            self._wake.clear()
            try:
                with self._round:
                    if self._backend is not None:
                        self._one_round(self._backend)
                wait, failures = self._until_due(), 0
            except OperatorError as error:
                wait = self._fail(str(error), failures)
                failures += 1
            except Exception as error:  # a bug: it is told, and must not end the replacing of workers in silence
                _log.exception("The operator's round failed")
                wait = self._fail(f"The operator failed: {type(error).__name__}: {error}", failures)
                failures += 1
            if failures:
                self._closed.wait(wait)  # a wake-up is no reason to ask sooner somebody who does not answer
            else:
                self._wake.wait(wait)

    def _fail(self, message: str, failures: int) -> float:
        with self._lock:
            self._outage = message
        return min(max(self._every, 0.2) * 2 ** min(failures, 10), 10.0)

    def _until_due(self) -> float:
        with self._lock:
            due = self._reconciler.next_due()
        return self._every if due is None else min(self._every, max(0.0, due - time.monotonic()))

    def _observe(self, backend: Backend) -> Plan:
        try:
            seen = [one for one in backend.observe() if one.info.role in self._roles]
        except OperatorError as error:
            with self._lock:
                self._outage = str(error)
            raise
        with self._lock:
            self._seen, self._outage = seen, ""
            starts, ends = self._reconciler.plan(seen, time.monotonic())
            incarnations = self._reconciler.incarnations()
        self._incarnations.write(incarnations)  # before anything is started
        return starts, ends

    def _one_round(self, backend: Backend) -> bool:
        """Looks and acts; returns whether anything is there, or is about to be."""
        starts, ends = self._observe(backend)
        for end in ends:
            backend.end(end)
        for start in starts:
            if self._closed.is_set():
                break
            try:
                backend.start(start)
            except OperatorError as error:
                with self._lock:
                    self._reconciler.failed_to_start(start, time.monotonic(), str(error))
                continue
            with self._lock:
                self._reconciler.started(start, time.monotonic())
            self._wake.set()  # to list it
        with self._lock:
            return bool(self._seen or starts)


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
