"""A run of an environment in Weights & Biases. `WANDB_MODE=offline` keeps it on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlframe import extras
from rlframe.errors import UsageError


class WandbRun:
    """A run, from now until `finish`.

    Raises:
        UsageError: wandb is not installed, or cannot begin a run: nobody is logged in, say.
    """

    def __init__(self, project: str | None, group: str | None, name: str | None, config: Mapping[str, Any]) -> None:
        with extras.needed("use_wandb", "wandb", otherwise="or --env.use_wandb false"):
            import wandb
        self._table = wandb.Table
        try:
            self._run = wandb.init(project=project or None, group=group or None, name=name, config=dict(config))
        except wandb.Error as error:
            raise UsageError(
                f"Weights & Biases: {error} WANDB_MODE=offline keeps it here, --env.use_wandb false does without."
            ) from error

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
        """A table to be logged."""
        return self._table(columns=list(columns), data=[list(row) for row in rows])

    def finish(self) -> None:
        self._run.finish()
