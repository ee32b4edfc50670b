"""Experiment trackers that are asked for by name: Weights & Biases, and Trackio."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import uuid
from collections.abc import Mapping
from typing import Any

from rlframe import extras
from rlframe.metrics.base import Values, on_host, scalars, writing


class WandbLogger:
    """Rows to Weights & Biases; numbers as they are, arrays as histograms.

    `WANDB_MODE=offline` keeps the run in `directory` (send it later with `wandb sync`).

    Args:
        directory: the run directory. The run's id is kept in it, so that a resumed run continues the same curves.
        project: as on the web page.
        name: of the run; None: the directory's name.
        config: what the run was made with.
        mode: "online", "offline" or "disabled"; None: what `WANDB_MODE` says, else online.

    Raises:
        UsageError: wandb is not installed.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        project: str = "rlframe",
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        mode: Any = None,
    ) -> None:
        with extras.needed("WandbLogger", "wandb"):
            import wandb
        self._histogram = wandb.Histogram
        directory = pathlib.Path(directory)
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            id_file = directory / "wandb_run_id"
            if not id_file.exists():
                id_file.write_text(uuid.uuid4().hex)
            run_id = id_file.read_text()
        self._run: Any = wandb.init(
            project=project,
            name=name or directory.resolve().name,
            id=run_id,
            resume="allow",
            dir=str(directory),
            config=dict(config or {}),
            mode=mode,
            settings=wandb.Settings(silent=True),
        )

    def write(self, step: int, values: Values) -> None:
        row = on_host(values)
        arrays = {name: self._histogram(value) for name, value in row.items() if hasattr(value, "shape")}
        self._run.log({**scalars(row), **arrays}, step=int(step))

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()


class TrackioLogger:
    """The numbers of rows to Trackio: a local dashboard (`trackio show`), or a server or Space that its variables name.

    Args:
        directory: the run directory, whose name is the run's.
        project: as in the dashboard.
        config: what the run was made with.

    Raises:
        UsageError: trackio is not installed.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, project: str = "rlframe", config: Mapping[str, Any] | None = None
    ) -> None:
        with extras.needed("TrackioLogger", "trackio"):
            import trackio
        # `trackio.finish` forgets the run too, or Trackio ends it again, talking, when the process exits.
        self._finish = trackio.finish
        # Trackio greets on stdout, which belongs to the result of the command.
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
                except RuntimeError:  # closed by another thread than the one that opened it
                    run.finish()
