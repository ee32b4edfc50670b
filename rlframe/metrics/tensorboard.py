"""TensorBoard's event files, written by tensorboardX: no TensorFlow."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import numpy as np

from rlframe.metrics.base import Values, on_host, writing

_FILES = itertools.count()


class TensorBoardLogger:
    """Numbers become curves, arrays histograms; strings are left out.

    Written by the caller's thread: tensorboardX's own `SummaryWriter` writes from a thread that dies when the
    disk is full, after which its caller waits for ever.

    Args:
        directory: gets a new event file each time, as TensorBoard expects.
        resume_at: tells TensorBoard to drop the points of earlier files after this step.
    """

    def __init__(self, directory: str | os.PathLike[str], *, resume_at: int | None = None) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._directory = os.fspath(directory)
        with writing(self._directory):
            os.makedirs(self._directory, exist_ok=True)
            # tensorboardX names files by the second: two in one second would be one file.
            self._writer: Any = EventsWriter(os.path.join(self._directory, "events"), f".{os.getpid()}.{next(_FILES)}")
        if resume_at is not None:
            log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._put(event_pb2.Event(wall_time=time.time(), step=resume_at + 1, session_log=log))

    def write(self, step: int, values: Values) -> None:
        summary = self._summary()
        for name, value in on_host(values).items():
            if isinstance(value, np.ndarray):
                if np.isfinite(value).any():
                    summary.value.add(tag=name, histo=self._histogram(value))
            elif isinstance(value, (bool, int, float)):
                summary.value.add(tag=name, simple_value=float(value))
        self._put(self._event(wall_time=time.time(), step=int(step), summary=summary))

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with writing(self._directory):
                writer.close()

    def _put(self, event: Any) -> None:
        with writing(self._directory):
            self._writer.write_event(event)
            self._writer.flush()

    def _histogram(self, array: np.ndarray) -> Any:
        from tensorboardX.proto import summary_pb2

        finite = array[np.isfinite(array)].astype(np.float64)
        counts, edges = np.histogram(finite, bins=30)
        return summary_pb2.HistogramProto(
            min=finite.min(),
            max=finite.max(),
            num=finite.size,
            sum=finite.sum(),
            sum_squares=np.square(finite).sum(),
            bucket_limit=edges[1:].tolist(),
            bucket=counts.tolist(),
        )
