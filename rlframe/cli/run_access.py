"""How commands find and reach a run that is under way: by its directory, or by the URL of its control."""

from __future__ import annotations

import dataclasses
import ipaddress
import pathlib
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Union

import tyro

from rlframe import extras
from rlframe.cli.parsing import CommandOptions
from rlframe.errors import UsageError

if TYPE_CHECKING:
    from rlframe.coordinator.control.client import ControlClient


@dataclasses.dataclass(frozen=True)
class ControlOptions(CommandOptions):
    """Options that name a run by the URL of its control."""

    url: Union[str, None] = None  # URL of the run's control, as http://127.0.0.1:8765
    token_file: Union[str, None] = None  # file with the token that the control wants; RUN_DIR knows its own
    json: bool = False  # print one JSON object


@dataclasses.dataclass(frozen=True)
class RunOptions(ControlOptions):
    """The same, or by the directory of a run on this machine."""

    run_dir: Annotated[
        Union[str, None], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR", help="directory of a run")
    ] = None


def connect(options: Any, prog: str) -> ControlClient:
    """Connect to the control of a run, for the command `prog`. Raise `UsageError` if it cannot be found."""
    with extras.needed(prog, "trajectories"):
        from rlframe.coordinator.control.client import ControlClient
        from rlframe.http.config import read_token
    from rlframe.coordinator.control.address import read_control

    if options.run_dir is None:
        return ControlClient(options.url, read_token(options.token_file))
    known = read_control(options.run_dir)
    if _is_elsewhere(options.run_dir, known.url):
        raise UsageError(
            f"The control of the run in {options.run_dir} is at {known.url} of another host: use `{prog}` there."
        )
    return ControlClient(known.url, read_token(options.token_file or known.token_file))


def check_names_one_run(options: Any) -> None:
    """Raise `UsageError` unless one run is named."""
    if (options.run_dir is None) == (options.url is None):
        raise UsageError("Name one run, by RUN_DIR or by the --url of its control.")


def has_reachable_coordinator(run_dir: str) -> bool:
    """Return True if the run in a directory has a coordinator, whose control is on this host."""
    from rlframe.coordinator.control.address import control_file, read_control
    from rlframe.programs.run_dir.status import topology_of

    is_elastic = topology_of(run_dir) in (None, "elastic") and control_file(run_dir).exists()
    return is_elastic and extras.is_installed("trajectories") and not _is_elsewhere(run_dir, read_control(run_dir).url)


def _is_elsewhere(run_dir: str, url: str) -> bool:
    """Return True if a URL names loopback of another host: here anybody may listen there, and would get the token."""
    from rlframe.programs.run_dir.lock import holder_of

    holder, host = holder_of(pathlib.Path(run_dir)), urllib.parse.urlsplit(url).hostname
    if holder is None or holder.is_of_this_kernel:
        return False
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def status_by_files(run_dir: str) -> Callable[[], dict[str, Any]]:
    """Return a function that reads the status of a run from its directory: the coordinator's last, or the current."""
    from rlframe.coordinator.control.address import status_when_over
    from rlframe.programs.run_dir.status import StatusReader

    last = status_when_over(run_dir)
    return StatusReader(run_dir) if last is None else lambda: last
