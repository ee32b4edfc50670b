"""`rlframe resume`."""

from __future__ import annotations

from typing import Any

from rlframe.cli.control import run_command

DESCRIPTION = "Have a run of the topology elastic go on after `rlframe pause`."


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit code."""
    return run_command(arguments, "rlframe resume", DESCRIPTION, _resume)


def _resume(client: Any, _: Any) -> str:
    client.resume()
    return "It goes on."
