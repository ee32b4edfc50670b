"""TensorBoard's event files, in tensorboardX's message classes: no TensorFlow."""

from __future__ import annotations

import itertools
import os
import pathlib
import socket
import struct
import time
from typing import Any

import numpy as np

from rlframe.metrics.base import Values, append, on_host, writing

_FILES = itertools.count()  # two loggers made in one second have a file each


class TensorBoardLogger:
    """Numbers become curves, arrays histograms; strings are left out.

    Each row is in the file once `write` returns. tensorboardX's own `SummaryWriter` writes from a thread that dies
    when the disk is full, after which its caller waits for ever, and its file writer calls fsync for each flush.

    Args:
        directory: gets a new event file each time, as TensorBoard expects.
        resume_at: tells TensorBoard to drop the points of earlier files after this step.
    """

    def __init__(self, directory: str | os.PathLike[str], *, resume_at: int | None = None) -> None:
        from tensorboardX.proto import event_pb2, summary_pb2
        from tensorboardX.record_writer import masked_crc32c

        self._event, self._summary, self._checksum = event_pb2.Event, summary_pb2.Summary, masked_crc32c
        self._histogram_proto = summary_pb2.HistogramProto
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{next(_FILES)}"
        self._path = pathlib.Path(directory) / name
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("xb", buffering=0)
        self._put(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
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
        self._file.close()

    def _put(self, event: Any) -> None:
        """Append one record as TFRecord files have it: length, its checksum, data, its checksum."""
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = struct.pack("<I", self._checksum(length)), struct.pack("<I", self._checksum(data))
        append(self._file.fileno(), b"".join([length, checksums[0], data, checksums[1]]), self._path)

    def _histogram(self, array: np.ndarray) -> Any:
        finite = array[np.isfinite(array)].astype(np.float64)
        counts, edges = np.histogram(finite, bins=30)
        return self._histogram_proto(
            min=finite.min(),
            max=finite.max(),
            num=finite.size,
            sum=finite.sum(),
            sum_squares=np.square(finite).sum(),
            bucket_limit=edges[1:].tolist(),
            bucket=counts.tolist(),
        )
