"""The thread in which the coordinator calls the replay buffer and the param store.

It handles only keys of items and version numbers, never data or parameters.
"""

from __future__ import annotations

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
from rlframe.coordinator.messages import BatchMeta
from rlframe.errors import RlframeError
from rlframe.replay.replay_files import ReplayFiles

_log = logging.getLogger(__name__)

_WAIT = 0.2  # seconds that a draw waits for enough data
_STATS_EVERY = 0.5  # seconds between two reads of the replay buffer's counters
_SAVE_EVERY = 30.0  # seconds between two saves of a small replay buffer
_JOIN_TIMEOUT = 60.0  # seconds to wait for the last save and the end of the thread


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
        self, replay: Any, param_store: Any, put_event: Callable[[Any], None], directory: pathlib.Path
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
        self._carry_out: dict[type, Callable[[Any], None]] = {
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

    def put(self, effect: Any) -> None:
        """Queue an effect."""
        self._effects.put(effect)

    def close(self) -> None:
        """Carry out the queued effects, read the counters a last time, save the buffer if due, and end the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT)

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
                drawn = self._replay.draw(timeout=0.0 if batches else _WAIT)
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
