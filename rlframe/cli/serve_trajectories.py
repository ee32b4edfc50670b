"""`rlframe serve trajectories`."""

from __future__ import annotations

import dataclasses
from typing import Union

from rlframe.cli.parsing import parse
from rlframe.cli.serve import warn_if_open
from rlframe.errors import UsageError

PROG = "rlframe serve trajectories"
DESCRIPTION = (
    "Serve trajectories: environments send groups of sequences over HTTP, trainers pull batches of them. "
    "The endpoints are described at /docs."
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What `rlframe serve trajectories` takes."""

    host: str = "127.0.0.1"  # address to listen at; 0.0.0.0 for all networks
    port: int = 8000  # 0: one that is free
    store: str = "sqlite:trajectories.db"  # sqlite:PATH, memory, or redis://HOST:PORT/DATABASE
    token_file: Union[str, None] = None  # file with the bearer token that every request has to carry
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
    try:
        from rlframe.trajectories.serving import serve
    except ModuleNotFoundError as error:
        raise UsageError(f"The service needs the package {error.name}: pip install 'rlframe[trajectories]'.") from error
    from rlframe.trajectories.settings import Settings

    names = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{name: getattr(options, name) for name in names})
    warn_if_open(options.host, options.token_file, "read, send and reset")
    serve(settings, options.host, options.port, options.max_connections)
    return 0
