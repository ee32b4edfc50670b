"""The data's side of a coordinator: keys are drawn, priorities set, versions kept; no data passes."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.messages import BatchMeta
from rlframe.errors import RlframeError

_log = logging.getLogger(__name__)

_WAIT = 0.2  # seconds that a draw waits for enough to be there
_STATS_EVERY = 0.5  # seconds


class ReplayThread:
    """Draws keys for learners and tells the buffer what became of them; keeps versions for evaluations.

    Args:
        replay: the buffer. Where it gives no keys, it is only asked for its counters.
        param_store: see `rlframe.coordinator.param_store`.
        happened: is called with `Drawn` and `Pinned`.

    Attributes:
        stats: the buffer's counters, as they were a moment ago.
    """

    def __init__(self, replay: Any, param_store: Any, happened: Callable[[Any], None]) -> None:
        self._replay, self._store, self._happened = replay, param_store, happened
        spec = getattr(replay, "spec", None)
        self._max_staleness = spec.max_staleness if spec is not None else None
        self._kind = spec.kind if spec is not None else ""
        self._wanted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stop = threading.Event()
        self.stats: dict[str, Any] = {}
        self._looked_at = 0.0
        self._thread = threading.Thread(target=self._run, name="rlframe keys", daemon=True)

    def start(self) -> None:
        """Begins to take effects."""
        self._thread.start()

    def put(self, effect: Any) -> None:
        """Takes an effect, and returns at once."""
        self._wanted.put(effect)

    def close(self) -> None:
        """Ends the thread, once what is to be done is done, and looks at the counters a last time."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def _run(self) -> None:
        while True:
            try:
                effect = self._wanted.get(timeout=0.1)
            except queue.Empty:
                if self._stop.is_set():
                    break
                effect = None
            try:
                if isinstance(effect, ev.Draw):
                    self._draw(effect)
                elif isinstance(effect, ev.Settle):
                    self._settle(effect)
                elif isinstance(effect, ev.Pin):
                    version = self._store.pin(effect.policy_id)
                    self._happened(ev.Pinned(effect.task_id, effect.policy_id, version))
                elif isinstance(effect, ev.Unpin):
                    self._store.unpin(effect.policy_id, effect.params_version)
            except RlframeError as error:
                _log.warning("The coordinator's data: %s", error)
                if isinstance(effect, ev.Draw):
                    self._happened(ev.Drawn(effect.header, ()))
            self._look()
        self._looked_at = 0.0
        self._look()

    def _look(self) -> None:
        if time.monotonic() < self._looked_at + _STATS_EVERY or not hasattr(self._replay, "stats"):
            return
        self._looked_at = time.monotonic()
        try:
            self.stats = {"kind": self._kind, **self._replay.stats()}
        except Exception as error:  # a server that is being restarted: asked again
            _log.info("The replay buffer does not say how full it is: %s", error)

    def _draw(self, effect: ev.Draw) -> None:
        batches: list[BatchMeta] = []
        while len(batches) < effect.count:
            drawn = self._replay.draw(timeout=0.0 if batches else _WAIT)
            if drawn is None:
                break
            batches.append(BatchMeta(drawn.keys, drawn.probabilities))
        self._happened(ev.Drawn(effect.header, tuple(batches)))

    def _settle(self, effect: ev.Settle) -> None:
        for update in effect.updates:
            if update.priorities is not None and self._kind == "prioritised":
                self._replay.update_priorities(update.keys, update.priorities)
        for batch in effect.batches:
            self._replay.finish(batch.keys)
        if effect.updates:
            self._replay.note_update(np.concatenate([update.keys for update in effect.updates]), effect.params_version)
        if self._max_staleness is not None and effect.params_version >= 0:
            self._replay.forget_before(effect.params_version - self._max_staleness)
