"""`rlframe pause`, `resume` and `scale`, and what all commands for a run that goes on share: which one is meant, and
how they reach it."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import pathlib
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Union

import tyro

from rlframe import extras
from rlframe.cli.parsing import parse
from rlframe.coordinator.messages import ROLES
from rlframe.errors import UsageError, suggest

if TYPE_CHECKING:
    from rlframe.coordinator.control.client import ControlClient


@dataclasses.dataclass(frozen=True)
class ControlOptions:
    """Options that name a run by the URL of its control."""

    url: Union[str, None] = None  # URL of the run's control, as http://127.0.0.1:8765
    token_file: Union[str, None] = None  # file with the token that the control wants; RUN_DIR knows its own
    json: bool = False  # print one JSON object
    traceback: bool = False  # show where an error came from


@dataclasses.dataclass(frozen=True)
class RunOptions(ControlOptions):
    """The same, or by the directory of a run on this machine."""

    run_dir: Annotated[
        Union[str, None], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR", help="directory of a run")
    ] = None


def connected(options: Any, prog: str) -> ControlClient:
    """A client of the run's control, for the command `prog`. Raises `UsageError` where none can be."""
    with extras.needed(prog, "trajectories"):
        from rlframe.coordinator.control.client import ControlClient
    from rlframe.coordinator.control.address import read_control
    from rlframe.http.token_file import read_token

    if options.run_dir is None:
        return ControlClient(options.url, read_token(options.token_file))
    known = read_control(options.run_dir)
    if _is_elsewhere(options.run_dir, known.url):
        raise UsageError(
            f"The control of the run in {options.run_dir} is at {known.url} of another host: use `{prog}` there."
        )
    return ControlClient(known.url, read_token(options.token_file or known.token_file))


def check_names_one_run(options: Any) -> None:
    """Raise `UsageError` where no run is named, or two are."""
    if (options.run_dir is None) == (options.url is None):
        raise UsageError("Name one run, by RUN_DIR or by the --url of its control.")


def is_steered(run_dir: str) -> bool:
    """Whether the run in a directory has a coordinator whose control can be asked from here."""
    from rlframe.coordinator.control.address import control_file, read_control
    from rlframe.programs.run_status import topology_of

    is_elastic = topology_of(run_dir) in (None, "elastic") and control_file(run_dir).exists()
    return is_elastic and extras.is_installed("trajectories") and not _is_elsewhere(run_dir, read_control(run_dir).url)


def _is_elsewhere(run_dir: str, url: str) -> bool:
    """Whether a URL means a port of another host, at which anybody may listen here: it must not get the run's token."""
    from rlframe.programs.run_lock import holder_of

    holder, host = holder_of(pathlib.Path(run_dir)), urllib.parse.urlsplit(url).hostname
    if holder is None or holder.is_of_this_kernel:
        return False
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def status_by_files(run_dir: str) -> Callable[[], dict[str, Any]]:
    """Return what gives the status of a run by the files of its directory: its coordinator's last one, or now's."""
    from rlframe.coordinator.control.address import status_when_over
    from rlframe.programs.run_status import StatusReader

    last = status_when_over(run_dir)
    return StatusReader(run_dir) if last is None else lambda: last


@dataclasses.dataclass(frozen=True)
class ScaleOptions(ControlOptions):
    """Options of `rlframe scale`."""

    words: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="[RUN_DIR] ROLE N", help="directory of a run; collector; workers from now on"),
    ] = ()

    @property
    def run_dir(self) -> str | None:
        """The run's directory, if it comes before the role and the number."""
        return self.words[0] if len(self.words) == 3 else None


def _pause(client: ControlClient, _: Any) -> str:
    client.pause()
    return "Paused. `rlframe resume` has it go on."


def _resume(client: ControlClient, _: Any) -> str:
    client.resume()
    return "It goes on."


def _scale(client: ControlClient, options: ScaleOptions) -> str:
    words = options.words[1:] if options.run_dir is not None else options.words
    role, number = (*words, "", "")[:2]
    if role not in ROLES:
        asked = f"{role!r} is no role" if role else "Name a role and a number"
        raise UsageError(f"{asked}; there are {', '.join(ROLES)}.{suggest(role, ROLES)}")
    if not number.isdecimal() or len(words) > 2:
        raise UsageError(f"Say how many workers: rlframe scale [RUN_DIR] {role} N.")
    client.scale(role, int(number))
    return f"{number} of the role {role} from now on."


# Commands that are one call: what each takes, the call, which returns what to tell a person, and its help.
_CALLS: dict[str, tuple[type, Callable[[ControlClient, Any], str], str]] = {
    "pause": (
        RunOptions,
        _pause,
        "Have a run of the topology elastic hold: nothing is collected or learned until `rlframe resume`.",
    ),
    "resume": (RunOptions, _resume, "Have a run of the topology elastic go on after `rlframe pause`."),
    "scale": (
        ScaleOptions,
        _scale,
        "Change how many workers a run of the topology elastic has, as in `rlframe scale RUN_DIR collector 4`.",
    ),
}


def _check_goes_on(run_dir: str, prog: str) -> None:
    """Raise `UsageError` where the run in a directory has no coordinator, or nobody runs it now."""
    from rlframe.programs.run_lock import holder_of
    from rlframe.programs.run_status import topology_of

    topology = topology_of(run_dir)
    if topology not in (None, "elastic"):
        raise UsageError(f"`{prog}` is for the topology elastic: the run in {run_dir} is of {topology}.")
    if topology is not None and holder_of(pathlib.Path(run_dir)) is None:
        job = status_by_files(run_dir)()["job"]
        raise UsageError(
            f"The run in {run_dir} is not going ({job['state']} at {job['env_steps']:,} env steps: {job['reason']}): "
            f"`{prog}` has nobody to tell."
        )


def run(command: str, arguments: list[str]) -> int:
    """Run `pause`, `resume` or `scale`, for a run under a coordinator, and return its exit code."""
    prog = f"rlframe {command}"
    options_class, call, description = _CALLS[command]
    options: Any = parse(options_class, arguments, prog, description)
    check_names_one_run(options)
    if options.run_dir is not None:
        _check_goes_on(options.run_dir, prog)
    with connected(options, prog) as client:
        told = call(client, options)
    print(json.dumps({"status": "ok"}) if options.json else told)
    return 0
