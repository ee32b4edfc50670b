"""`rlframe serve coordinator`."""

from __future__ import annotations

import dataclasses
from typing import Union

from rlframe import extras
from rlframe.cli.parsing import parse

PROG = "rlframe serve coordinator"
DESCRIPTION = (
    "Serve a queue of elastic runs: POST /submit takes an experiment, and they run one after the other, each in a "
    "process that outlives this one. The control of the one that runs is here, with a live page at /. The endpoints "
    "are described at /docs."
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What `rlframe serve coordinator` takes."""

    host: str = "127.0.0.1"  # address to listen at; another one than loopback needs a --token-file
    port: int = 8765  # 0: one that is free
    token_file: Union[str, None] = None  # file with the bearer token that every request has to carry; None: RUNS/token
    runs: str = "runs/coordinator"  # directory of the queue and its runs
    max_connections: int = 256  # at the same time; more are refused
    traceback: bool = False  # show where an error came from


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit code."""
    options = parse(Options, arguments, PROG, DESCRIPTION)
    extras.require(PROG, "trajectories", "launchpad")  # with which its runs run
    with extras.needed(PROG, "trajectories"):
        from rlframe.coordinator.control.job_service import serve_jobs
    serve_jobs(
        options.runs,
        options.host,
        options.port,
        options.token_file,
        max_connections=options.max_connections,
    )
    return 0
