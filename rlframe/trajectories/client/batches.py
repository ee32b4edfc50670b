"""Batches of a TrajectoryBuffer: threads prefetch them and renew their leases, and `pad` makes equal lengths."""

from __future__ import annotations

import bisect
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlframe.replay.base import WAKE_INTERVAL, Dataset
from rlframe.trajectories.client.client import TrajectoryClient
from rlframe.trajectories.client.groups import Group
from rlframe.trajectories.messages import IGNORED
from rlframe.types import Batch, TokenBatch

if TYPE_CHECKING:
    from rlframe.trajectories.client.buffer import TrajectoryBuffer

_JOIN_TIMEOUT = 2.0  # seconds


class PrefetchingDataset(Dataset):
    """An endless iterator of batches. Use it as a context manager, or close it.

    At most `prefetch` batches are leased in addition to the batch that the Learner uses. With a large `prefetch`,
    training is worse: each prefetched batch makes the Learner's data one training step older.

    Args:
        buffer: The buffer that requests the batches.
        client: A client that only this thread uses. `close` closes the client.
    """

    def __init__(
        self, buffer: TrajectoryBuffer, client: TrajectoryClient, prefetch: int, timeout: float | None
    ) -> None:
        self._trajectories, self._client = buffer, client
        self._room = threading.Semaphore(max(1, prefetch))
        self._lock = threading.Lock()  # guards `_read` and `_ahead`
        self._read: int | None = None  # id of the last batch that `__next__` returned
        self._ahead: set[int] = set()
        super().__init__(buffer, prefetch, timeout)

    def __next__(self) -> Batch:
        """Return the next batch, and mark the previous batch as finished. See `Dataset`."""
        self._trajectories.finish(self._read)
        batch = super().__next__()
        self._read = int(batch.keys[0, 1])
        with self._lock:
            self._ahead.discard(self._read)
        self._room.release()
        return batch

    def close(self) -> None:
        """Stop the thread and return the prefetched batches to the service. A second call does nothing."""
        super().close()
        with self._lock:
            ahead, self._ahead = sorted(self._ahead), set()
        self._trajectories.give_back(ahead)
        self._client.close()

    def _draw(self) -> Batch | None:
        if not self._room.acquire(timeout=WAKE_INTERVAL):
            return None
        batch = self._trajectories.draw(self._client, WAKE_INTERVAL)
        if batch is None:
            self._room.release()
            return None
        with self._lock:
            self._ahead.add(int(batch.keys[0, 1]))
        return batch

    def _interrupt(self) -> None:
        self._client.stop()


class LeaseRenewal:
    """A thread that renews leases: it calls `renew` every `period` seconds.

    The thread stops at `close`, or when the object that has the method `renew` no longer exists.

    Args:
        renew: A bound method that never raises.
        period: Seconds between two calls.
    """

    def __init__(self, renew: Callable[[], None], period: float) -> None:
        self._renew = weakref.WeakMethod(renew)
        self._period = period
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlframe lease renewal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. If it waits for the service, it may end after this call. A second call does nothing."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_TIMEOUT)

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            renew = self._renew()
            if renew is None:
                return
            renew()
            del renew  # while the thread sleeps, it must not keep the buffer alive


_SHORTEST = 64  # tokens

_log = logging.getLogger(__name__)


def bucket_lengths(max_token_len: int) -> list[int]:
    """Return the possible lengths of a padded batch: powers of two and their midpoints, up to `max_token_len`.

    So the padding is shorter than half of the longest sequence. There is one compiled update for each length, for
    example 21 updates for sequences of up to 65,536 tokens.
    """
    lengths, length = [], _SHORTEST
    while length < max_token_len:
        lengths += [length, length + length // 2]
        length *= 2
    return [length for length in lengths if length < max_token_len] + [max_token_len]


def pad(groups: Sequence[Group], buckets: list[int]) -> tuple[TokenBatch, int]:
    """Convert `groups` to arrays. The arrays have the smallest length in `buckets` that fits the longest sequence.

    Sequences that are longer than the last bucket are truncated. The loss of the remaining tokens stays correct.

    Returns:
        (batch, number of truncated sequences).
    """
    full = np.concatenate([group.lengths for group in groups])
    lengths = np.minimum(full, buckets[-1])
    length = buckets[bisect.bisect_left(buckets, lengths.max())]
    shape = (len(lengths), length)
    scores = np.concatenate([group.scores for group in groups]).astype(np.float32)
    present = np.arange(length) < lengths[:, None]
    masks = _fill([row for group in groups for row in group.masks], shape, np.int32)
    mask = ((masks != IGNORED) & present).astype(np.float32)
    advantages = np.repeat(scores[:, None], length, axis=1)
    sent = [row for group in groups for row in group.advantages or [None] * len(group)]
    having = np.array([row is not None for row in sent])
    advantages[having] = _fill([row for row in sent if row is not None], (having.sum(), length), np.float32)
    overrides = [override for group in groups for override in group.sequence_overrides]
    zeroed = np.array([bool(override.get("set_advantage_to_zero")) for override in overrides])
    temperature = np.concatenate([group.temperatures for group in groups])
    advantages[zeroed] = 0.0
    batch = TokenBatch(
        tokens=_fill([row for group in groups for row in group.tokens], shape, np.int32),
        mask=mask,
        advantages=advantages * mask,
        has_advantages=having | zeroed,
        scores=scores,
        temperature=None if (temperature == 1).all() else temperature,
        inference_logprobs=_optional("inference_logprobs", groups, mask),
        ref_logprobs=_optional("ref_logprobs", groups, mask),
        lengths=lengths,
        group=np.repeat(np.arange(len(groups), dtype=np.int32), [len(group) for group in groups]),
    )
    return batch, int((full > lengths).sum())


def _optional(name: str, groups: Sequence[Group], mask: np.ndarray) -> np.ndarray | None:
    having = [group for group in groups if getattr(group, name) is not None]
    if len(having) < len(groups):
        if having:
            without = sorted({str(group.env_id) for group in groups if getattr(group, name) is None})
            _log.warning(
                "A batch is without %s: only %d of its %d groups have them. They are missing from environment %s.",
                name,
                len(having),
                len(groups),
                ", ".join(without),
            )
        return None
    return _fill([row for group in groups for row in getattr(group, name)], mask.shape, np.float32) * mask


def _fill(rows: Sequence[np.ndarray], shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    filled = np.zeros(shape, dtype)
    for target, row in zip(filled, rows):
        count = min(len(row), shape[1])
        target[:count] = row[:count]
    return filled
