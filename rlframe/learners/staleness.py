"""Which batches are too old for an on-policy learner."""

from __future__ import annotations

import logging

import numpy as np

from rlframe.replay import BaseReplayBuffer

_log = logging.getLogger(__name__)


class StalenessLimit:
    """Holds a replay to its `max_staleness`; where it has none, nothing is too old.

    Args:
        replay_buffer: that the batches come from.
    """

    def __init__(self, replay_buffer: object) -> None:
        self._buffer = replay_buffer if isinstance(replay_buffer, BaseReplayBuffer) else None
        self._limit = self._buffer.spec.max_staleness if self._buffer is not None else None
        # The version of the checkpoint that the learner goes on from: the first one after it has the same parameters.
        self.resumed_from: int | None = None

    @property
    def is_set(self) -> bool:
        """Whether there is a limit."""
        return self._limit is not None

    def refuses(self, versions: np.ndarray, newest: int) -> bool:
        """Whether a batch that `versions` [B] acted in was drawn before the buffer knew of the version `newest`."""
        if self._limit is None:
            return False
        old = versions < newest - self._limit
        if self.resumed_from is not None:
            old &= (versions < self.resumed_from - self._limit) | (versions > self.resumed_from)
        if not old.any():
            return False
        _log.warning(
            "A batch of versions %d to %d is dropped: version %d learns from those that are at most %d older.",
            versions.min(),
            versions.max(),
            newest,
            self._limit,
        )
        return True

    def forget(self, newest: int) -> None:
        """Has the buffer drop what is too old for the version `newest`."""
        if self._limit is not None:
            assert self._buffer is not None
            self._buffer.forget_before(newest - self._limit)


def mean_version(versions: np.ndarray) -> float:
    """Of those that are known, NaN where none is; -1 stands for one that is not."""
    # Not `mean`, which costs several times as much.
    if versions.min() >= 0:
        return versions.sum() / len(versions)
    known = versions[versions >= 0]
    return known.sum() / len(known) if len(known) else np.nan
