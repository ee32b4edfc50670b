"""Batches drawn ahead from a Reverb server, by samplers that never stop."""

from __future__ import annotations

import time
from typing import Any

from rlframe.replay.dataset import WAKE, Dataset
from rlframe.replay.reverb.connection import ReverbConnection, Samplers
from rlframe.replay.reverb.tables import REPLAY
from rlframe.types import Batch

_LOOK_EVERY = 2.0  # seconds without a batch between two looks at whether the server is there
_LEAST_AHEAD = 256  # items; below that, round trips decide how fast they come


class ReverbDataset(Dataset):
    """Like `Dataset`. The buffer must have `batch_size`, `missing`, `due`, `keep` and `take`."""

    _buffer: Any

    def __init__(
        self, buffer: Any, connection: ReverbConnection, prefetch: int, timeout: float | None, threads: int
    ) -> None:
        self._connection, self._num_samplers = connection, threads
        self._samplers: Samplers | None = None
        self._looked = time.monotonic()
        self._gone_since: float | None = None
        self._count, self._counted = 0, 0.0
        super().__init__(buffer, prefetch, timeout)

    def _draw(self) -> Batch | None:
        # A sampler waits, without a deadline, for a server that is not there: so ask first.
        if self._samplers is None and self._connection.look() is None:
            return None
        if not self._count or time.monotonic() > self._counted + WAKE:
            self._count, self._counted = self._buffer.batch_size(), time.monotonic()
        count = self._count
        if not count:
            self._stop.wait(WAKE)
            return None
        missing = self._buffer.missing(count)
        if self._samplers is None:
            # What is drawn ahead of a queue nobody else can draw, and in any replay it gets older.
            is_queue, blocks = self._buffer.spec.kind == "queue", max(0, missing) + 1
            ahead, samplers = (blocks, 1) if is_queue else (max(blocks, _LEAST_AHEAD), self._num_samplers)
            self._samplers = self._connection.samplers(REPLAY, ahead, samplers)
        if missing > 0:
            # A batch of one item of each environment need not wait for all of them: each that comes may make it due.
            self._collect(self._samplers, 1 if self._buffer.spec.batch_size is None else missing, missing)
        due = self._buffer.due(count)
        return self._buffer.take(due) if due else None

    def _collect(self, samplers: Samplers, least: int, missing: int) -> None:
        """Waits a while for `least` of the `missing` draws."""
        if self._stop.is_set():  # maybe before there were samplers to close
            return
        try:
            self._buffer.keep(samplers.draw(least, missing, WAKE))
        except RuntimeError as error:
            if self._stop.is_set():
                return
            self._samplers = None
            samplers.Close()
            if not self._connection.has_lost(error):
                raise

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
        self._interrupt()  # samplers that the thread may have opened since

    def _interrupt(self) -> None:
        samplers = self._samplers
        if samplers is not None:
            samplers.Close()
