"""`rlframe stop`."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlframe.cli.control import ControlOptions, run_command

DESCRIPTION = (
    "End a run under a coordinator in good order: what is under way is taken to its end and the policy is saved, "
    "without a last evaluation. It cannot be undone."
)


@dataclasses.dataclass(frozen=True)
class Options(ControlOptions):
    """What `rlframe stop` takes."""

    reason: str = "stopped by hand"  # what the run's state says from then on


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit code."""
    return run_command(arguments, "rlframe stop", DESCRIPTION, _stop, Options)


def _stop(client: Any, options: Options) -> str:
    client.cancel(options.reason)
    return "It is told to stop; `rlframe status --watch` shows its end."
