"""`rlframe serve trajectories`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Union

import tyro

from rlframe import extras
from rlframe.cli.parsing import parse

PROG = "rlframe serve trajectories"
DESCRIPTION = (
    "Serve trajectories: environments send groups of sequences over HTTP, trainers pull batches of them. "
    "The endpoints are described at /docs."
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What `rlframe serve trajectories` takes."""

    host: str = "127.0.0.1"  # address to listen at; 0.0.0.0 for all networks, which needs a --token-file or --no-token
    port: int = 8000  # 0: one that is free
    store: str = "sqlite:trajectories.db"  # sqlite:PATH, memory, or redis://HOST:PORT/DATABASE
    token_file: Union[str, None] = None  # file with the bearer token that every request has to carry
    # answer other machines without a token: whoever reaches the service can read, send and erase experience
    no_token: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    # a name that the service is reached under, beside localhost and IP addresses; only without a token
    allowed_hosts: Annotated[tuple[str, ...], tyro.conf.arg(name="allowed-host"), tyro.conf.UseAppendAction] = ()
    tokenizer: Union[str, None] = None  # file tokenizer.json with which the live page shows tokens as text
    max_queue_mb: int = 16_384  # megabytes of groups that are kept; environments are told to hold at 80 % of it
    max_body_mb: int = 64  # megabytes of one request, decompressed
    max_connections: int = 1024  # at the same time; more are refused
    reset: bool = True  # whether /reset_data is there
    cors_origins: tuple[str, ...] = ()  # origins whose pages may call the service, or *
    traceback: bool = False  # show where an error came from


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit code."""
    options = parse(Options, arguments, PROG, DESCRIPTION)
    if options.tokenizer is not None:
        extras.require("--tokenizer", "trajectories", "tokenizers")
    with extras.needed(PROG, "trajectories"):
        from rlframe.trajectories.service.serving import serve
    from rlframe.trajectories.service.settings import Settings

    names = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{name: getattr(options, name) for name in names})
    serve(settings, options.host, options.port, options.max_connections)
    return 0
