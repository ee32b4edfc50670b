"""A learner's access to its replay buffer: sample batches, drop old batches, pass priorities, read counters."""

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

_PATIENCE = 0.5  # maximum seconds that `LearnerReplay.stats` waits for the counters


class LearnerReplay:
    """Wrapper of a Learner's replay buffer. It has the same methods for each kind of buffer.

    A `BaseReplayBuffer` supports all of these methods. A buffer that only implements `ReplayReader` has no counters and
    no `max_staleness`, and is not saved in checkpoints.

    Args:
        given: the Learner's `replay_buffer`: a buffer, a handle to a buffer in this process, or a `reverb.Client`. None
            if the batches are made elsewhere.
        agent: the agent. If `given` is a `reverb.Client`, the agent's specs define the format of the items.
        stop: setting this event ends all waits for other processes.
        learner_samples: False if another process draws the items, and also sets priorities, drops old items and saves
            the buffer.

    Attributes:
        buffer: the wrapped buffer.
        saved: the buffer if the Learner's checkpoints contain it, otherwise None.
        max_staleness: number of versions that a batch may be behind the newest. None means no limit.

    Raises:
        UsageError: the buffer is on another node.
    """

    def __init__(self, given: Any, agent: Agent, stop: threading.Event, *, learner_samples: bool = True) -> None:
        target = handles.resolve(given, "replay buffer", stop=stop)
        if isinstance(target, handles.Remote):
            raise UsageError(
                "A Learner cannot sample from a replay buffer on another node, because that node would copy every "
                "batch. Use a buffer in shared memory, or Reverb."
            )
        self.buffer: Any = None if target is None else as_replay_buffer(target, lambda: agent)
        self._is_own = self.buffer is not target
        # `self.buffer` if it is a `BaseReplayBuffer`, otherwise None.
        self._full = self.buffer if isinstance(self.buffer, BaseReplayBuffer) else None
        self._learner_samples = learner_samples
        self.saved: BaseReplayBuffer | None = None
        if learner_samples and self._full is not None and self._full.is_saved_by_learner:
            self.saved = self._full
        self.max_staleness = self._full.spec.max_staleness if self._full is not None else None
        self._resumed_from: int | None = None  # version of the restored checkpoint, until the next update
        self._dataset: Any = None
        self._stats_thread = threading.Thread()  # thread of `stats`; this placeholder never runs
        self._stats: dict[str, int] = {}

    @classmethod
    def of(cls, given: Any, agent: Agent, stop: threading.Event) -> LearnerReplay:
        """Return `given` if it is a LearnerReplay, otherwise wrap it."""
        return given if isinstance(given, cls) else cls(given, agent, stop)

    # --- batches

    def make_dataset(self, data_cfg: DataConfig) -> Iterable[Batch]:
        """Return the batches that `Learner.run` learns from, fetched ahead. `close_dataset` ends the iteration."""
        make_dataset = self._method("make_dataset", "run() takes batches from it")
        self._dataset = make_dataset(**data_cfg.options_of(make_dataset))
        return self._dataset

    def close_dataset(self) -> None:
        """Close the dataset. This ends the wait for a batch."""
        if self._dataset is not None:
            self._dataset.close()

    def is_too_old(self, versions: np.ndarray, newest: int) -> bool:
        """Return True and log a warning if an item of a batch is too old for a learner with the version `newest`.

        This happens if the batch was sampled before the buffer dropped its old items.

        Args:
            versions: [B], for each item the version of the parameters that chose its actions.
            newest: current version of the learner.
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
            "Dropping a batch of versions %d to %d: version %d learns only from versions that are at most %d older.",
            versions.min(),
            versions.max(),
            newest,
            limit,
        )
        return True

    # --- notify the buffer of the learner's updates

    def resume(self, version: int) -> None:
        """Until the next update, accept items that are not too old for the `version` of the restored checkpoint."""
        self._resumed_from = version

    def drop_too_old(self, newest: int, *, after_update: bool = False) -> None:
        """Drop items from the buffer that are too old for the version `newest`."""
        if self._learner_samples and self._full is not None and self.max_staleness is not None:
            self._full.forget_before(newest - self.max_staleness)
        if after_update:
            self._resumed_from = None

    def note_update(self, keys: Any, version: int) -> None:
        """See `BaseReplayBuffer`."""
        if self._learner_samples and self._full is not None:
            self._full.note_update(keys, version)

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """See `ReplayReader`."""
        if self._learner_samples:
            self._method("update_priorities", "The agent logs priorities")(keys, priorities)

    def _method(self, name: str, reason: str) -> Callable[..., Any]:
        if not hasattr(self.buffer, name):
            kind = type(self.buffer).__name__
            raise UsageError(f"The replay buffer of this Learner, a {kind}, needs {name}(). {reason}.")
        return getattr(self.buffer, name)

    # --- calls from other threads

    def stats(self) -> dict[str, int]:
        """Return the newest counters. Wait at most half a second, because the buffer may be a slow or dead server."""
        if self._full is None:
            return {}
        thread = self._stats_thread
        if not thread.is_alive():
            thread = self._stats_thread = threading.Thread(target=self._fetch_stats, name="rlframe replay", daemon=True)
            thread.start()
        thread.join(_PATIENCE)
        return self._stats

    def _fetch_stats(self) -> None:
        with contextlib.suppress(RlframeError):  # for example, if the server has died
            self._stats = self._full.stats() if self._full is not None else {}

    def stop(self) -> None:
        """End the wait for a batch. Close the buffer if this object created it."""
        self.close_dataset()
        if self._is_own:
            self.buffer.close()
