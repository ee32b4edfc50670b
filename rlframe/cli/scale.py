"""`rlframe scale`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import tyro

from rlframe.cli.control import ControlOptions, run_command
from rlframe.coordinator.messages import ROLES
from rlframe.errors import UsageError, suggest

DESCRIPTION = "Change how many workers of a role a run under a coordinator has, as in `rlframe scale collector 4`."


@dataclasses.dataclass(frozen=True)
class Options(ControlOptions):
    """What `rlframe scale` takes."""

    role: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ROLE", help="collector (learner, evaluator)")] = (
        ""
    )
    n: Annotated[int, tyro.conf.Positional, tyro.conf.arg(metavar="N", help="workers from now on")] = -1


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit code."""
    return run_command(arguments, "rlframe scale", DESCRIPTION, _scale, Options)


def _scale(client: Any, options: Options) -> str:
    if options.role not in ROLES:
        asked = f"{options.role!r} is no role" if options.role else "Name a role and a number"
        raise UsageError(f"{asked}; there are {', '.join(ROLES)}.{suggest(options.role, ROLES)}")
    if options.n < 0:
        raise UsageError(f"Say how many workers: rlframe scale {options.role} N.")
    client.scale(options.role, options.n)
    return f"{options.n} of the role {options.role} from now on."
