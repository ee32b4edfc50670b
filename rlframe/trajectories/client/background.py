"""Threads of a TrajectoryBuffer: one prefetches batches, another renews leases."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlframe.replay.base import WAKE_INTERVAL, Dataset
from rlframe.trajectories.client.client import TrajectoryClient
from rlframe.types import Batch

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
