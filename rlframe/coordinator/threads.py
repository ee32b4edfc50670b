"""Two threads in which the coordinator calls other processes, so that it never waits itself.

`OperatorThread` calls the operator, to request workers and to list them. `ReplayThread` calls the replay buffer and the
param store. It handles only keys of items and version numbers, never data or parameters. `worker_calls.py` calls the
workers.
"""

from __future__ import annotations

import collections
import functools
import logging
import pathlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rlframe import handles
from rlframe.coordinator.core import events as ev
from rlframe.coordinator.messages import ROLES, BatchMeta, WorkerInfo
from rlframe.coordinator.operators import Operator, OperatorError
from rlframe.errors import PeerError, RlframeError, UsageError
from rlframe.replay.replay_files import ReplayFiles
from rlframe.retry import backoff

_log = logging.getLogger(__name__)

_BACKOFF = 0.25, 5.0  # shortest and longest pause in seconds between two attempts to reach the operator
_PATIENCE = 5.0  # seconds to wait for the end of all workers, in addition to the operator's grace period
_OPERATOR_JOIN = 10.0  # seconds to wait for the end of the thread; each call to an operator takes less time

# ReplayThread
_DRAW_WAIT = 0.2  # seconds that a draw waits for enough data
_STATS_EVERY = 0.5  # seconds between two reads of the replay buffer's counters
_SAVE_EVERY = 30.0  # seconds between two saves of a small replay buffer
_REPLAY_JOIN = 60.0  # seconds to wait for the last save and the end of the thread


class OperatorThread:
    """A thread that carries out effects by calls to the operator, and lists the workers a few times per second.

    While the operator cannot be reached, effects stay in the queue and are retried with backoff.

    Args:
        operator: See `rlframe.coordinator.operators`.
        put_event: Function that receives `OperatorAnswered`, `OperatorFailed` and `WorkersEnded`.
    """

    def __init__(self, operator: Operator, put_event: Callable[[ev.Event], None]) -> None:
        self._operator, self._put_event = operator, put_event
        self._effects: collections.deque[ev.Effect] = collections.deque()
        self._carry_out: dict[type[ev.Effect], Callable[[Any], None]] = {
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

    def put(self, effect: ev.Effect) -> None:
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
            self._thread.join(_OPERATOR_JOIN)
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


class ReplayThread:
    """A thread that draws the keys of batches for learners, releases used batches, and pins versions for evaluations.

    Args:
        replay: The replay buffer. If it cannot return items by key, this thread only reads its counters.
        param_store: A `ParamStore`, or a handle to one.
        put_event: Function that receives `BatchesDrawn` and `Pinned`.
        directory: Directory for saves of the replay buffer. Unused if another process draws from the buffer.

    Attributes:
        stats: Recent counters of the replay buffer.
    """

    def __init__(
        self, replay: Any, param_store: Any, put_event: Callable[[ev.Event], None], directory: pathlib.Path
    ) -> None:
        self._replay, self._put_event = replay, put_event
        self._store = handles.resolve(param_store, "param store")
        spec = getattr(replay, "spec", None)
        self._max_staleness = spec.max_staleness if spec is not None else None
        self._kind = spec.kind if spec is not None else ""
        self._effects: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stop = threading.Event()
        self.stats: dict[str, Any] = {}
        self._stats_read_at = 0.0
        # The process that draws from a buffer also saves it.
        draws = bool(getattr(replay, "fetches_by_key", False))
        self._files = ReplayFiles(directory, 1) if draws and replay.is_saved_by_learner else None
        self._save_at = time.monotonic() + _SAVE_EVERY
        self._carry_out: dict[type[ev.Effect], Callable[[Any], None]] = {
            ev.DrawBatches: self._draw,
            ev.FinishBatches: self._finish_batches,
            ev.SaveReplay: lambda effect: self._save(),
            ev.Pin: self._pin,
            ev.Unpin: lambda effect: self._store.unpin(effect.policy_id, effect.params_version),
        }
        self._thread = threading.Thread(target=self._run, name="rlframe keys", daemon=True)

    def start(self) -> None:
        """Restore the saved replay buffer, then start the thread.

        If the buffer still has its items, only their priorities are restored.

        Raises:
            CheckpointError: The saved buffer is damaged.
        """
        if self._files is not None and (newest := self._files.newest()) is not None:
            self._files.restore(self._replay, newest)
        self._thread.start()

    def put(self, effect: ev.Effect) -> None:
        """Queue an effect."""
        self._effects.put(effect)

    def close(self) -> None:
        """Carry out the queued effects, read the counters a last time, save the buffer if due, and end the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_REPLAY_JOIN)

    def _run(self) -> None:
        while True:
            try:
                effect = self._effects.get(timeout=0.1)
                self._try(functools.partial(self._carry_out[type(effect)], effect))
            except queue.Empty:
                if self._stop.is_set():
                    break
            self._read_stats()
            if time.monotonic() > self._save_at:
                self._try(self._save_if_due)
        self._stats_read_at = 0.0
        self._read_stats()
        self._try(functools.partial(self._save_if_due, final=True))

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # keep the thread alive, because the job waits for events from it
            _log.warning(
                "The coordinator's replay thread could not carry out an action: %s",
                error,
                exc_info=not isinstance(error, RlframeError),
            )

    def _read_stats(self) -> None:
        if time.monotonic() < self._stats_read_at + _STATS_EVERY or not hasattr(self._replay, "stats"):
            return
        self._stats_read_at = time.monotonic()
        try:
            self.stats = {"kind": self._kind, **self._replay.stats()}
        except Exception as error:  # the server may be restarting; try again later
            _log.info("Cannot read the counters of the replay buffer: %s", error)

    def _save_if_due(self, *, final: bool = False) -> None:
        self._save_at = time.monotonic() + _SAVE_EVERY
        if self._files is not None and self._files.is_due(self._replay, final):
            self._save()

    def _save(self) -> None:
        files = self._files
        if files is not None and self._replay.stats()["steps"]:
            files.save(self._replay, (files.newest() or 0) + 1)
            files.prune()
            self._save_at = time.monotonic() + _SAVE_EVERY

    def _pin(self, effect: ev.Pin) -> None:
        version = -1
        try:
            version = self._store.pin(effect.policy_id)
        finally:
            self._put_event(ev.Pinned(effect.task_id, effect.policy_id, version))

    def _draw(self, effect: ev.DrawBatches) -> None:
        batches: list[BatchMeta] = []
        why = ""
        try:
            while len(batches) < effect.count:
                drawn = self._replay.draw(timeout=0.0 if batches else _DRAW_WAIT)
                if drawn is None:
                    break
                batches.append(BatchMeta(drawn.keys, drawn.probabilities))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            _log.debug("Drawing batches failed.", exc_info=True)
        self._put_event(ev.BatchesDrawn(effect.header, tuple(batches), why))

    def _finish_batches(self, effect: ev.FinishBatches) -> None:
        for update in effect.updates:
            if update.priorities is not None and self._kind == "prioritized":
                self._replay.update_priorities(update.keys, update.priorities)
        for batch in effect.batches:
            self._replay.release(batch.keys)
        if effect.updates:
            self._replay.note_update(np.concatenate([update.keys for update in effect.updates]), effect.params_version)
        if self._max_staleness is not None and effect.params_version >= 0:
            self._replay.forget_before(effect.params_version - self._max_staleness)
