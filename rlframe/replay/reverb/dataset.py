"""Batches drawn ahead from a Reverb server, by a sampler that never stops."""

from __future__ import annotations

import threading
import time
from typing import Any

from rlframe.replay.dataset import WAKE, Dataset
from rlframe.replay.reverb.connection import ReverbConnection, Samplers
from rlframe.replay.reverb.tables import REPLAY
from rlframe.types import Batch

_LOOK_EVERY = 2.0  # seconds without a batch between two looks at whether the server is there
_LEAST_AHEAD = 256  # items; below that, round trips decide how fast they come
_SAMPLERS = 2


class ReverbDataset(Dataset):
    """Like `Dataset`. The buffer must have `batch_size`, `missing`, `keep` and `take`."""

    _buffer: Any

    def __init__(self, buffer: Any, connection: ReverbConnection, prefetch: int, timeout: float | None) -> None:
        self._connection = connection
        self._sampler: Any = None
        self._looked = time.monotonic()
        self._gone_since: float | None = None
        # Where a batch need not wait for everybody, items are drawn by a thread of their own, which nobody waits for.
        self._reader: threading.Thread | None = None
        self._count, self._counted = 0, 0.0
        self._came, self._taken = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        super().__init__(buffer, prefetch, timeout)

    def _draw(self) -> Batch | None:
        # A sampler waits, without a deadline, for a server that is not there: so ask first.
        if self._sampler is None and self._connection.look() is None:
            return None
        if not self._count or time.monotonic() > self._counted + WAKE:
            self._count, self._counted = self._buffer.batch_size(), time.monotonic()
        count = self._count
        if not count:
            self._stop.wait(WAKE)
            return None
        if self._sampler is None:
            # What is drawn ahead of a queue nobody else can draw, and in any replay it gets older.
            blocks = self._buffer.missing(count) + 1
            if self._buffer.spec.kind == "queue":
                self._sampler = self._connection.sampler(REPLAY, blocks)
            else:
                self._sampler = self._connection.samplers(REPLAY, max(blocks, _LEAST_AHEAD), _SAMPLERS)
        if self._buffer.spec.batch_size is None:
            return self._draw_shares(count)
        while (missing := self._buffer.missing(count)) > 0:
            if not self._collect(missing):
                return None
        return self._buffer.take(count)

    def _draw_shares(self, count: int) -> Batch | None:
        """One item of each environment, as soon as all are there whom it is worth waiting for."""
        if self._failure is not None:
            raise self._failure
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=self._read, name="rlframe reverb reader", daemon=True)
            self._reader.start()
        due = self._buffer.due(count)
        if not due:
            self._came.wait(WAKE)
            self._came.clear()
            return None
        batch = self._buffer.take(due)
        self._taken.set()
        return batch

    def _read(self) -> None:
        try:
            while not self._stop.is_set():
                if self._buffer.missing(self._count) <= 0:
                    self._taken.wait(WAKE)
                    self._taken.clear()
                elif self._collect(1):
                    self._came.set()
                else:
                    return
        except BaseException as error:  # whatever it is, the reader of the dataset must hear of it
            self._failure = error
            self._came.set()

    def _collect(self, missing: int) -> bool:
        """Waits for `missing` more draws, and returns whether all came."""
        if self._stop.is_set():  # maybe before there was a sampler to close
            return False
        drawn: list[Any] = []
        try:
            if isinstance(self._sampler, Samplers):
                drawn = self._sampler.draw(missing)
            else:
                draw = self._sampler.GetNextTrajectory  # raises when the sampler is closed
                for _ in range(missing):
                    drawn.append(draw())
        except RuntimeError as error:
            if self._stop.is_set():
                return False
            sampler, self._sampler = self._sampler, None
            sampler.Close()
            if not self._connection.has_lost(error):
                raise
        finally:
            self._buffer.keep(drawn)
        return len(drawn) == missing

    def _check(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY:
            return
        self._looked = now
        if self._connection.look() is not None:
            self._gone_since = None
            return
        self._gone_since = self._gone_since or now
        if now - self._gone_since >= self._connection.timeout:
            raise self._connection.silent("sample", now - self._gone_since)

    def close(self) -> None:
        super().close()
        self._interrupt()  # a sampler that the thread may have opened since
        # A process that ends while a thread is inside of a sampler is aborted by it.
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(timeout=10.0)

    def _interrupt(self) -> None:
        if self._sampler is not None:
            self._sampler.Close()
