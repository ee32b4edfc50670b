"""Batches drawn ahead by a thread."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING

from rlframe.errors import RlframeError
from rlframe.interprocess.heartbeat import patience
from rlframe.types import Batch

if TYPE_CHECKING:
    from rlframe.replay.base import BaseReplayBuffer

_TIMEOUT = 600.0  # seconds without a batch after which something is wrong
WAKE = 0.2  # seconds between two looks at whether to stop; wake-ups make the usual wait much shorter


class DatasetTimeoutError(RlframeError, TimeoutError):
    """No batch came within the time that was given."""


class Dataset:
    """An endless iterator of batches. Use it as a context manager, or close it.

    Drawing ahead depends on timing: where the numbers must repeat exactly, call `sample()` instead.

    Args:
        buffer: what it reads.
        prefetch: batches that are drawn ahead.
        timeout: seconds that `next` waits for a batch; None: 600, or for ever in a process that is watched
            (`rlframe.interprocess.heartbeat`).
    """

    def __init__(self, buffer: BaseReplayBuffer, prefetch: int, timeout: float | None):
        self._buffer, self._timeout = buffer, patience(_TIMEOUT) if timeout is None else timeout
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=max(1, prefetch))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlframe replay dataset", daemon=True)
        self._thread.start()

    def __iter__(self) -> Dataset:
        return self

    def __next__(self) -> Batch:
        """Returns the next batch.

        Raises:
            StopIteration: the dataset or the buffer is closed.
            DatasetTimeoutError: no batch came within the timeout.
        """
        deadline = time.monotonic() + self._timeout
        while not self._stop.is_set():
            try:
                batch = self._ready.get(timeout=min(WAKE, max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                self._check()
                if time.monotonic() < deadline:
                    continue
                spec = self._buffer.spec
                raise DatasetTimeoutError(
                    f"No batch came within {self._timeout:g} s: the replay buffer holds {self._buffer.size} items, and "
                    f"needs {spec.min_size} and a batch of {spec.batch_size or 'one per environment'}. "
                    "Are its actors running?"
                ) from None
            if isinstance(batch, BaseException):
                self.close()
                raise batch
            return batch
        raise StopIteration

    def close(self) -> None:
        """Ends the thread. Calling it twice does nothing."""
        self._stop.set()
        self._interrupt()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10.0)

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and not self._buffer.closed:
                batch = self._draw()
                if batch is not None:
                    self._put(batch)
                del batch  # so that its arrays can be used again as soon as the reader drops it
        except BaseException as error:  # whatever it is, the reader must hear of it
            self._put(error)
        else:
            self._stop.set()

    def _draw(self) -> Batch | None:
        """The next batch, or None after a while without one. Runs in the thread."""
        return self._buffer.wait_for_batch(WAKE)

    def _check(self) -> None:
        """Called while the reader waits. Raises where no batch can come any more."""

    def _interrupt(self) -> None:
        """Ends a `_draw` under way, where it would not end by itself."""

    def _put(self, batch: Batch | BaseException) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(batch, timeout=WAKE)
                return
            except queue.Full:
                continue
