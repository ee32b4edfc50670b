"""`rlframe join`."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated

import tyro

from rlframe.cli.parsing import parse

PROG = "rlframe join"
DESCRIPTION = (
    "Add actors on this machine to a run on another, which was started with `rlframe train --topology distributed "
    "--listen PORT`. Ends when the run is over. The two machines must trust each other: see docs/distributed.md."
)


@dataclasses.dataclass(frozen=True)
class JoinOptions:
    """Options of `rlframe join`."""

    address: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HOST:PORT")]  # where the run listens
    num_actors: int = 2  # processes of environments on this machine, each with as many as the run's own
    num_inferencers: int = 1  # inference services on this machine
    deadline: float = 60.0  # seconds that the run's machine may be out of reach
    traceback: bool = False  # show where an error came from


def run(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    options = parse(JoinOptions, arguments, PROG, DESCRIPTION)
    import setproctitle

    setproctitle.setproctitle("rlframe: join")
    os.environ.update(JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3")  # before they are imported: nothing learns here
    from rlframe.programs.join import join

    number = join(
        options.address,
        num_actors=options.num_actors,
        num_inferencers=options.num_inferencers,
        deadline=options.deadline,
    )
    return 0 if number is None else 128 + number
