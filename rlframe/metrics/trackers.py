"""Loggers for experiment trackers: Weights & Biases, Trackio, and TensorBoard's event files."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import socket
import struct
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlframe import extras
from rlframe.errors import UsageError
from rlframe.interprocess.files import stored_id
from rlframe.metrics.rows import Values, append, on_host, scalars, writing

_FILES = itertools.count()  # a number for each file name, because two files can have the same time stamp


class WandbLogger:
    """A logger for Weights & Biases: numbers become curves, arrays become histograms. Only this file imports `wandb`.

    With `WANDB_MODE=offline`, the run stays on this machine, and `wandb sync` uploads it later.

    Args:
        directory: The run directory. It stores the run's id, so that a resumed run continues the same curves. None
            makes a new run, which `wandb` stores in its default folder.
        project: Project in Weights & Biases. None uses the default of `wandb`.
        group: Group of runs in Weights & Biases.
        name: Name of the run. None means the directory's name.
        config: Options of the run.
        mode: "online", "offline" or "disabled". None means the value of `WANDB_MODE`, or "online" if it is not set.
        required_by: Name of the option or feature that needs this logger. Errors name it if wandb is not installed.
        otherwise: Text for error messages that explains how to run without this logger.

    Raises:
        UsageError: wandb is not installed, or cannot start a run, for example because nobody is logged in.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        *,
        project: str | None = "rlframe",
        group: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        mode: Any = None,
        required_by: str = "WandbLogger",
        otherwise: str = "",
    ) -> None:
        with extras.explain_import_error(required_by, "wandb", otherwise=otherwise):
            import wandb
        self._histogram, self._table = wandb.Histogram, wandb.Table
        options: dict[str, Any] = {"project": project, "group": group, "name": name, "config": dict(config or {})}
        if directory is not None:
            directory = pathlib.Path(directory)
            with writing(directory):
                options["id"] = stored_id(directory / "wandb_run_id")
            options |= {"resume": "allow", "dir": str(directory)}
            options["name"] = name or directory.resolve().name
            options["settings"] = wandb.Settings(silent=True)  # the TerminalLogger shows the progress
        try:
            self._run: Any = wandb.init(mode=mode, **options)
        except wandb.Error as error:
            way_out = f", {otherwise}" if otherwise else ""
            raise UsageError(
                f"Weights & Biases: {error} WANDB_MODE=offline keeps the run on this machine{way_out}."
            ) from error

    def write(self, step: int, values: Values) -> None:
        row = on_host(values).items()
        self._run.log({name: self._histogram(x) if hasattr(x, "shape") else x for name, x in row}, step=int(step))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Any:
        """Return a table that can be a value in a row."""
        return self._table(columns=list(columns), data=[list(row) for row in rows])

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()


class TrackioLogger:
    """A logger for Trackio. `trackio show` opens the local dashboard. Environment variables select a server or Space.

    Args:
        directory: The run directory. Its name is the run's name.
        project: Project in the dashboard.
        config: Options of the run.

    Raises:
        UsageError: trackio is not installed.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, project: str = "rlframe", config: Mapping[str, Any] | None = None
    ) -> None:
        with extras.explain_import_error("TrackioLogger", "trackio"):
            import trackio
        # `close` must call `trackio.finish`. Otherwise Trackio finishes the run again at exit, and prints messages.
        self._finish = trackio.finish
        # Trackio prints messages on stdout, but only the result of the command should be on stdout.
        with contextlib.redirect_stdout(sys.stderr):
            self._run: Any = trackio.init(
                project=project,
                name=pathlib.Path(directory).resolve().name,
                config=dict(config or {}),
                resume="allow",
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def write(self, step: int, values: Values) -> None:
        self._run.log(scalars(on_host(values)), step=int(step))

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            with contextlib.redirect_stdout(sys.stderr):
                try:
                    self._finish()
                except RuntimeError:  # another thread started the run
                    run.finish()


class TensorBoardLogger:
    """A logger for TensorBoard. Writes event files with tensorboardX's message classes, without TensorFlow.

    Numbers become curves, arrays become histograms. Strings are omitted.

    Each row is in the file when `write` returns. tensorboardX's own writers are not used: `SummaryWriter` would make
    its caller wait forever after the disk was full, and the file writer would call fsync at each flush.

    Args:
        directory: Folder for a new event file.
        resume_at: Step at which the run resumes. TensorBoard drops the points after this step in earlier files.
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
        """Append one record in TFRecord format: the length, its checksum, the data, the checksum of the data."""
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
