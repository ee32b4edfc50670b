"""Experiment trackers that are asked for by name: Weights & Biases, and Trackio."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlframe import extras
from rlframe.errors import UsageError
from rlframe.metrics.base import Values, on_host, scalars, writing


class WandbLogger:
    """Rows to Weights & Biases: numbers as they are, arrays as histograms. The one file that imports `wandb`.

    `WANDB_MODE=offline` keeps the run on this machine (send it later with `wandb sync`).

    Args:
        directory: the run directory. It holds the run's id, so that a resumed run continues the same curves. None: a
            new run, which `wandb` keeps where its own settings say.
        project: as on the web page; None: `wandb` decides.
        group: of runs, on the web page.
        name: of the run; None: the directory's name.
        config: the options that the run was made with.
        mode: "online", "offline" or "disabled"; None: as `WANDB_MODE` says, else online.
        asked_by: what needs this logger, for an error.
        otherwise: how to do without it, for an error.

    Raises:
        UsageError: wandb is not installed, or cannot begin a run, for example because nobody is logged in.
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
        asked_by: str = "WandbLogger",
        otherwise: str = "",
    ) -> None:
        with extras.needed(asked_by, "wandb", otherwise=otherwise):
            import wandb
        self._histogram, self._table = wandb.Histogram, wandb.Table
        options: dict[str, Any] = {"project": project, "group": group, "name": name, "config": dict(config or {})}
        if directory is not None:
            directory = pathlib.Path(directory)
            options |= {"id": _run_id(directory), "resume": "allow", "dir": str(directory)}
            options["name"] = name or directory.resolve().name
            options["settings"] = wandb.Settings(silent=True)  # a training run shows its own progress
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
        """Return a table, as a value of a row."""
        return self._table(columns=list(columns), data=[list(row) for row in rows])

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()


def _run_id(directory: pathlib.Path) -> str:
    """Read the id of the run in a directory, or make one."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / "wandb_run_id"
        if not file.exists():
            file.write_text(uuid.uuid4().hex)
        return file.read_text()


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
