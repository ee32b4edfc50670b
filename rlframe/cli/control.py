"""What the commands for a run under a coordinator share: which one is meant, and how they reach it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Union

from rlframe.cli.parsing import parse
from rlframe.errors import UsageError

if TYPE_CHECKING:
    from rlframe.coordinator.control.client import ControlClient

URL_VARIABLE = "RLFRAME_COORDINATOR"
DEFAULT_URL = "http://127.0.0.1:8765"


@dataclasses.dataclass(frozen=True)
class ControlOptions:
    """Which run. Without any: what RLFRAME_COORDINATOR names, else http://127.0.0.1:8765."""

    url: Union[str, None] = None  # of its control, as http://127.0.0.1:8765
    run_dir: Union[str, None] = None  # directory of a run on this machine, which says where its control is
    runs: Union[str, None] = None  # directory of a queue on this machine: that of `rlframe serve coordinator --runs`
    token_file: Union[str, None] = None  # file with the token that the control wants; --run-dir and --runs know theirs
    json: bool = False  # print one JSON object
    traceback: bool = False  # show where an error came from


def connected(options: ControlOptions) -> ControlClient:
    """A client of the control that is meant. Raises `UsageError` where none can be."""
    try:
        from rlframe.coordinator.control.client import ControlClient
    except ModuleNotFoundError as error:
        raise UsageError(f"This needs the package {error.name}: pip install 'rlframe[trajectories]'.") from error
    from rlframe.coordinator.control.address import read_control, read_queue
    from rlframe.http.token_file import read_token

    if sum(named is not None for named in (options.url, options.run_dir, options.runs)) > 1:
        raise UsageError("Name a run by one of --url, --run-dir and --runs.")
    known = read_control(options.run_dir) if options.run_dir is not None else None
    known = read_queue(options.runs) if options.runs is not None else known
    if known is not None:
        return ControlClient(known.url, read_token(options.token_file or known.token_file))
    url = options.url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    return ControlClient(url, read_token(options.token_file))


def run_command(
    arguments: list[str],
    prog: str,
    description: str,
    call: Callable[[ControlClient, Any], str],
    options_class: type = ControlOptions,
) -> int:
    """A command that is one call, and returns its exit code.

    Args:
        call: of the client and the options; returns what to tell a person.
        options_class: `ControlOptions`, or one with more.
    """
    options: Any = parse(options_class, arguments, prog, description)
    with connected(options) as client:
        told = call(client, options)
    print(json.dumps({"status": "ok"}) if options.json else told)
    return 0
