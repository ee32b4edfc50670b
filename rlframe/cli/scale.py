"""`rlframe scale`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import tyro

from rlframe.cli.control import ControlOptions, run_command
from rlframe.coordinator.messages import ROLES
from rlframe.errors import UsageError, suggest

DESCRIPTION = "Change how many workers a run of the topology elastic has, as in `rlframe scale RUN_DIR collector 4`."


@dataclasses.dataclass(frozen=True)
class Options(ControlOptions):
    """What `rlframe scale` takes."""

    words: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="[RUN_DIR] ROLE N", help="directory of a run; collector; workers from now on"),
    ] = ()

    @property
    def run_dir(self) -> str | None:
        """Where it comes before the role and the number."""
        return self.words[0] if len(self.words) == 3 else None


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit code."""
    return run_command(arguments, "rlframe scale", DESCRIPTION, _scale, Options)


def _scale(client: Any, options: Options) -> str:
    words = options.words[1:] if options.run_dir is not None else options.words
    role, number = (*words, "", "")[:2]
    if role not in ROLES:
        asked = f"{role!r} is no role" if role else "Name a role and a number"
        raise UsageError(f"{asked}; there are {', '.join(ROLES)}.{suggest(role, ROLES)}")
    if not number.isdecimal() or len(words) > 2:
        raise UsageError(f"Say how many workers: rlframe scale [RUN_DIR] {role} N.")
    client.scale(role, int(number))
    return f"{number} of the role {role} from now on."
