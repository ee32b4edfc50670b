"""What goes on beside a TrajectoryBuffer, in threads: batches are drawn ahead, and leases are renewed."""

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

_PATIENCE = 2.0  # seconds


class PrefetchingDataset(Dataset):
    """An endless iterator of batches. Use it as a context manager, or close it.

    Exactly `prefetch` batches are leased ahead of the one that the reader has: each one more is a batch older when it
    is learned from.

    Args:
        buffer: whose batches.
        client: of the thread's own; it is closed with the dataset.
    """

    def __init__(
        self, buffer: TrajectoryBuffer, client: TrajectoryClient, prefetch: int, timeout: float | None
    ) -> None:
        self._trajectories, self._client = buffer, client
        self._room = threading.Semaphore(max(1, prefetch))
        self._lock = threading.Lock()  # of the two below
        self._read: int | None = None  # the reader has this batch
        self._ahead: set[int] = set()
        super().__init__(buffer, prefetch, timeout)

    def __next__(self) -> Batch:
        """See `Dataset`. The batch before is done with."""
        self._trajectories.finish(self._read)
        batch = super().__next__()
        self._read = int(batch.keys[0, 1])
        with self._lock:
            self._ahead.discard(self._read)
        self._room.release()
        return batch

    def close(self) -> None:
        """End the thread and give back what it drew ahead. Calling it twice does nothing."""
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
    """Has leases go on for as long as whoever holds them lives: calls a method now and then, until `close`, or until
    the method's object is gone.

    Args:
        renew: a bound method, which raises nothing.
        period: seconds between two calls.
    """

    def __init__(self, renew: Callable[[], None], period: float) -> None:
        self._renew = weakref.WeakMethod(renew)
        self._period = period
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlframe lease renewal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. A call to a service that does not answer ends later. Twice does nothing more."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            renew = self._renew()
            if renew is None:
                return
            renew()
            del renew  # else the object lives until the next call
