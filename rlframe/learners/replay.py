"""The replay buffer of a learner: batches that are not too old, priorities, counters."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from rlframe import handles
from rlframe.agents.base import Agent
from rlframe.errors import RlframeError, UsageError
from rlframe.learners.config import DataConfig
from rlframe.replay import BaseReplayBuffer, as_replay_buffer
from rlframe.types import Batch

_log = logging.getLogger(__name__)

_PATIENCE = 0.5  # seconds that `LearnerReplay.stats` waits


class LearnerReplay:
    """The replay buffer that a Learner was given, with the same methods for each kind of it.

    A `BaseReplayBuffer` can do all of this. An object that has the methods of a `ReplayReader` alone has no counters
    and no `max_staleness`, and is in no checkpoint.

    Args:
        given: the argument of the Learner: a buffer, a handle to one in this process, or a `reverb.Client`.
        agent: whose specs tell what a `reverb.Client` holds.
        stop: ends waits for other processes.

    Attributes:
        buffer: itself.
        saved: the buffer, if the Learner's checkpoints hold it; None: they do not.
        max_staleness: versions that a batch may be behind the newest; None: any number.

    Raises:
        UsageError: the buffer is on another node.
    """

    def __init__(self, given: Any, agent: Agent, stop: threading.Event) -> None:
        target = handles.resolve(given, "replay buffer", stop=stop)
        if isinstance(target, handles.Remote):
            raise UsageError(
                "A Learner cannot sample from a replay buffer on another node: batches would be copied through it. Use "
                "a buffer in shared memory, or Reverb."
            )
        self.buffer = as_replay_buffer(target, lambda: agent)
        self._is_own = self.buffer is not target
        # None: it has the methods of a `ReplayReader` alone.
        self._full = self.buffer if isinstance(self.buffer, BaseReplayBuffer) else None
        self.saved = self._full if self._full is not None and self._full.is_saved_by_learner else None
        self.max_staleness = self._full.spec.max_staleness if self._full is not None else None
        self._resumed_from: int | None = None  # until the next update
        self._dataset: Any = None
        self._asking = threading.Thread()  # of `stats`; this one never ran
        self._stats: dict[str, int] = {}

    # --- batches

    def make_dataset(self, data_cfg: DataConfig) -> Iterable[Batch]:
        """Return the batches that `Learner.run` learns from, drawn ahead. `close_dataset` ends them."""
        make_dataset = self._method("make_dataset", "run() takes batches from it")
        self._dataset = make_dataset(**data_cfg.options_of(make_dataset))
        return self._dataset

    def close_dataset(self) -> None:
        """End the wait for a batch."""
        if self._dataset is not None:
            self._dataset.close()

    def is_too_old(self, versions: np.ndarray, newest: int) -> bool:
        """Return True if a batch is too old for `newest`: it was drawn before the buffer dropped such items.

        Args:
            versions: [B] that acted.
            newest: version of the learner.
        """
        limit = self.max_staleness
        if limit is None:
            return False
        old = versions < newest - limit
        if self._resumed_from is not None:
            old &= (versions < self._resumed_from - limit) | (versions > self._resumed_from)
        if not old.any():
            return False
        _log.warning(
            "A batch of versions %d to %d is dropped: version %d learns from those that are at most %d older.",
            versions.min(),
            versions.max(),
            newest,
            limit,
        )
        return True

    # --- the state of the learner, which the buffer is told

    def resume(self, version: int) -> None:
        """Take `version`, of a checkpoint, to be as new as the next one: both have the same parameters."""
        self._resumed_from = version

    def drop_too_old(self, newest: int, *, after_update: bool = False) -> None:
        """Drop items from the buffer that are too old for the version `newest`, which an update may have made."""
        if self._full is not None and self.max_staleness is not None:
            self._full.forget_before(newest - self.max_staleness)
        if after_update:
            self._resumed_from = None

    def note_update(self, keys: Any, version: int) -> None:
        """See `BaseReplayBuffer`."""
        if self._full is not None:
            self._full.note_update(keys, version)

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """See `ReplayReader`."""
        self._method("update_priorities", "The agent logs priorities")(keys, priorities)

    def _method(self, name: str, why: str) -> Callable[..., Any]:
        if not hasattr(self.buffer, name):
            kind = type(self.buffer).__name__
            raise UsageError(f"The replay buffer of this Learner, a {kind}, needs {name}(). {why}.")
        return getattr(self.buffer, name)

    # --- calls from other threads

    def stats(self) -> dict[str, int]:
        """Return the newest counters. The buffer may be a server, which answers late or never: wait half a second."""
        if self._full is None:
            return {}
        thread = self._asking
        if not thread.is_alive():
            thread = self._asking = threading.Thread(target=self._ask, name="rlframe replay", daemon=True)
            thread.start()
        thread.join(_PATIENCE)
        return self._stats

    def _ask(self) -> None:
        with contextlib.suppress(RlframeError):  # the server is gone, say
            self._stats = self._full.stats() if self._full is not None else {}

    def stop(self) -> None:
        """End the wait for a batch, and close a buffer that was made here."""
        self.close_dataset()
        if self._is_own:
            self.buffer.close()
