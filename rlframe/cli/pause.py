"""`rlframe pause`."""

from __future__ import annotations

from typing import Any

from rlframe.cli.control import run_command

DESCRIPTION = "Have a run of the topology elastic hold: nothing is collected or learned until `rlframe resume`."


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit code."""
    return run_command(arguments, "rlframe pause", DESCRIPTION, _pause)


def _pause(client: Any, _: Any) -> str:
    client.pause()
    return "Paused. `rlframe resume` has it go on."
