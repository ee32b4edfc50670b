"""Commands about a run that is under way: `rlframe pause`, `unpause`, `scale` and `stop`, and how they find the run.

A run is named by its directory, or by the URL of its control. `status.py` finds it in the same way.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import pathlib
import time
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Union

import tyro

from rlframe import extras
from rlframe.cli.parsing import CommandOptions, parse
from rlframe.coordinator.messages import ROLES
from rlframe.errors import PeerError, UnavailableError, UsageError, suggest

if TYPE_CHECKING:
    from rlframe.coordinator.control.client import ControlClient
    from rlframe.programs.run_dir.lock import Holder

_STOP = "rlframe stop"
_STOP_DESCRIPTION = (
    "End a run as Ctrl-C does: it finishes the step under way and saves everything, without a last evaluation. Waits "
    "for the end of the run in RUN_DIR (of `--seeds` or of a sweep: of all runs), and says what is saved."
)
_POLL = 0.1  # seconds between two checks whether it has ended


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
    extras.require(prog, "trajectories")
    from rlframe.coordinator.control.address import read_control
    from rlframe.coordinator.control.client import ControlClient
    from rlframe.http.config import read_token

    if options.run_dir is None:
        return ControlClient(options.url, read_token(options.token_file))
    known = read_control(options.run_dir)
    if _is_elsewhere(options.run_dir, known.url):
        raise UsageError(
            f"The control of the run in {options.run_dir} is at {known.url} of another host: use `{prog}` there."
        )
    return ControlClient(known.url, read_token(options.token_file or known.token_file))


def check_one_run_is_named(options: Any) -> None:
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


def file_status_reader(run_dir: str) -> Callable[[], dict[str, Any]]:
    """Return a function that reads the status of a run from its directory: the coordinator's last, or the current."""
    from rlframe.coordinator.control.address import read_final_status
    from rlframe.programs.run_dir.status import StatusReader

    last = read_final_status(run_dir)
    return StatusReader(run_dir) if last is None else lambda: last


# --- rlframe pause, unpause and scale


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


def pause(arguments: list[str]) -> int:
    """Run `rlframe pause` and return its exit code."""
    prog = "rlframe pause"
    description = "Pause a run of the topology elastic: nothing is collected or learned until `rlframe unpause`."
    options = parse(RunOptions, arguments, prog, description)
    return _call(prog, options, lambda client: client.pause(), "Paused. `rlframe unpause` continues.")


def unpause(arguments: list[str]) -> int:
    """Run `rlframe unpause` and return its exit code."""
    prog = "rlframe unpause"
    options = parse(RunOptions, arguments, prog, "Continue a run of the topology elastic after `rlframe pause`.")
    return _call(prog, options, lambda client: client.unpause(), "The run continues.")


def scale(arguments: list[str]) -> int:
    """Run `rlframe scale` and return its exit code."""
    prog = "rlframe scale"
    description = "Set the number of workers of a run of the topology elastic: `rlframe scale RUN_DIR collector 4`."
    options = parse(ScaleOptions, arguments, prog, description)
    words = options.words[1:] if options.run_dir is not None else options.words
    role, number = (*words, "", "")[:2]
    if role not in ROLES:
        problem = f"{role!r} is no role" if role else "Name a role and a number"
        raise UsageError(f"{problem}; there are {', '.join(ROLES)}.{suggest(role, ROLES)}")
    if not number.isdecimal() or len(words) > 2:
        raise UsageError(f"Say how many workers: {prog} [RUN_DIR] {role} N.")
    message = f"{number} of the role {role} from now on."
    return _call(prog, options, lambda client: client.scale(role, int(number)), message)


def _call(prog: str, options: Any, call: Callable[[ControlClient], Any], message: str) -> int:
    """Make one call to the coordinator of a run, and print the message."""
    check_one_run_is_named(options)
    if options.run_dir is not None:
        _check_goes_on(options.run_dir, prog)
    with connect(options, prog) as client:
        call(client)
    print(json.dumps({"status": "ok"}) if options.json else message)
    return 0


def _check_goes_on(run_dir: str, prog: str) -> None:
    """Raise `UsageError` if the run in a directory has no coordinator, or no process runs it now."""
    from rlframe.programs.run_dir.lock import holder_of
    from rlframe.programs.run_dir.status import topology_of

    topology = topology_of(run_dir)
    if topology not in (None, "elastic"):
        raise UsageError(f"`{prog}` is for the topology elastic: the run in {run_dir} is of {topology}.")
    if topology is not None and holder_of(pathlib.Path(run_dir)) is None:
        job = file_status_reader(run_dir)()["job"]
        raise UsageError(
            f"The run in {run_dir} is not going ({job['state']} at {job['env_steps']:,} env steps: {job['reason']}): "
            f"`{prog}` has nobody to tell."
        )


# --- rlframe stop


@dataclasses.dataclass(frozen=True)
class StopOptions(RunOptions):
    """Options of `rlframe stop`."""

    reason: str = "stopped by hand"  # what the state of an elastic run says from then on
    within: float = 60.0  # seconds to wait for the end of the run in RUN_DIR


def stop(arguments: list[str]) -> int:
    """Run `rlframe stop` and return its exit code."""
    options = parse(StopOptions, arguments, _STOP, _STOP_DESCRIPTION)
    check_one_run_is_named(options)
    if options.run_dir is None:
        _ask_coordinator_to_stop(options)
        ended = {"status": "ok"}
        message = "The run will stop soon; `rlframe status --watch` shows its end."
    else:
        ended, message = _stop_in_directory(options, options.run_dir)
    print(json.dumps(ended) if options.json else message)
    return 1 if ended["status"] == "failed" else 0


def _ask_coordinator_to_stop(options: Any) -> None:
    with connect(options, _STOP) as client:
        client.cancel(options.reason)


def _stop_in_directory(options: StopOptions, run_dir: str) -> tuple[dict[str, Any], str]:
    """End the run in a directory. Return how it ended and what is saved, as an object and as a sentence."""
    from rlframe.programs.run_dir.directory import RUN, RunDir
    from rlframe.programs.run_dir.lock import holder_of

    directory = RunDir(run_dir)
    holder = holder_of(directory.path)
    if holder is None or directory.kind is None:
        directory.check_kind()
    if holder is None:
        job = file_status_reader(run_dir)()["job"]
        raise UsageError(f"The run in {run_dir} is over ({job['state']}: {job['reason']}): there is nothing to stop.")
    _end_process(options, run_dir, holder)
    if directory.kind != RUN:
        saved = f"What its runs did is saved. Go on: {directory.resume_command}"
        return {"status": "ok", "saved": saved}, f"It has ended. {saved}"
    job, saved = file_status_reader(run_dir)()["job"], directory.describe_checkpoint()
    status = "failed" if job["state"] == "FAILED" else "ok"
    at = f"{job['env_steps']:,} {job.get('unit') or 'env steps'}"
    message = f"It has ended at {at} ({job['state']}: {job['reason']}). {saved}"
    return {"status": status, "state": job["state"], "reason": job["reason"], "saved": saved}, message


def _end_process(options: StopOptions, run_dir: str, holder: Holder) -> None:
    """End the process that holds a directory, by its coordinator if it has one, and wait for the end."""
    from rlframe.programs.run_dir.lock import holder_of

    path = pathlib.Path(run_dir)
    try:
        if has_reachable_coordinator(run_dir):
            _ask_coordinator_to_stop(options)
        else:
            holder.terminate()
    except (PeerError, UnavailableError):  # its coordinator does not answer
        if holder_of(path) == holder:
            holder.terminate()
    deadline = time.monotonic() + options.within
    while holder_of(path) == holder:
        if time.monotonic() > deadline:
            raise PeerError(f"The run in {run_dir} has not ended within {options.within:g} s; {holder} goes on.")
        time.sleep(_POLL)
