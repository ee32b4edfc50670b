"""Commands for an active run: `rlframe pause`, `unpause`, `scale` and `stop`.

Users name a run by its directory or by the URL of its HTTP service. `status.py` uses the same
functions to find a run.
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
    from rlframe.control.client import ControlClient
    from rlframe.programs.run_dir.lock import Holder

_STOP = "rlframe stop"
_STOP_DESCRIPTION = (
    "End a run as Ctrl-C does: it finishes the current step and saves everything, without a final evaluation. With "
    "RUN_DIR, the command waits for the end of the run (or of all runs of `--seeds` or a sweep), and prints the last "
    "checkpoint."
)
_POLL = 0.1  # seconds between two checks for the end of the run


@dataclasses.dataclass(frozen=True)
class ControlOptions(CommandOptions):
    """Options that name a run by the URL of its HTTP service."""

    url: Union[str, None] = None  # URL of the run's HTTP service, such as http://127.0.0.1:8765
    token_file: Union[str, None] = None  # file with the token of the HTTP service; not needed with RUN_DIR
    json: bool = False  # print one JSON object


@dataclasses.dataclass(frozen=True)
class RunOptions(ControlOptions):
    """Options that name a run by its URL or by its directory on this machine."""

    run_dir: Annotated[
        Union[str, None], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR", help="directory of a run")
    ] = None


def connect(options: Any, prog: str) -> ControlClient:
    """Connect to the HTTP service of a run, for the command `prog`. Raise `UsageError` if there is no service."""
    extras.require(prog, "trajectories")
    from rlframe.control.address import read_control
    from rlframe.control.client import ControlClient
    from rlframe.http.config import read_token

    if options.run_dir is None:
        return ControlClient(options.url, read_token(options.token_file))
    known = read_control(options.run_dir)
    if _is_remote_loopback(options.run_dir, known.url):
        raise UsageError(
            f"The control API of the run in {options.run_dir} is at {known.url} on another host: run `{prog}` there."
        )
    return ControlClient(known.url, read_token(options.token_file or known.token_file))


def check_one_run_is_named(options: Any) -> None:
    """Raise `UsageError` unless the options name exactly one run."""
    if (options.run_dir is None) == (options.url is None):
        raise UsageError("Name one run: give either RUN_DIR or --url with the URL of the run's HTTP service.")


def has_reachable_coordinator(run_dir: str) -> bool:
    """Return True if the run in a directory has a coordinator whose HTTP service can be reached from this host."""
    from rlframe.control.address import control_file, read_control
    from rlframe.programs.run_dir.status import topology_of

    is_elastic = topology_of(run_dir) in (None, "elastic") and control_file(run_dir).exists()
    return (
        is_elastic
        and extras.is_installed("trajectories")
        and not _is_remote_loopback(run_dir, read_control(run_dir).url)
    )


def _is_remote_loopback(run_dir: str, url: str) -> bool:
    """Return True if the URL is a loopback address and the run is on another host.

    A different process on this host could listen at this address and receive the token.
    """
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
    """Return a function that reads the status of a run from its directory.

    If the coordinator wrote a final status, the function always returns this status.
    """
    from rlframe.control.address import read_final_status
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
        tyro.conf.arg(metavar="[RUN_DIR] ROLE N", help="directory of a run, a role (collector), number of its workers"),
    ] = ()

    @property
    def run_dir(self) -> str | None:
        """Directory of the run; None if only the role and the number are given."""
        return self.words[0] if len(self.words) == 3 else None


def pause(arguments: list[str]) -> int:
    """Run `rlframe pause` and return its exit code."""
    prog = "rlframe pause"
    description = "Pause a run with the elastic topology: it does not collect or learn until `rlframe unpause`."
    options = parse(RunOptions, arguments, prog, description)
    return _call(prog, options, lambda client: client.pause(), "Paused. `rlframe unpause` continues.")


def unpause(arguments: list[str]) -> int:
    """Run `rlframe unpause` and return its exit code."""
    prog = "rlframe unpause"
    options = parse(RunOptions, arguments, prog, "Continue a run with the elastic topology after `rlframe pause`.")
    return _call(prog, options, lambda client: client.unpause(), "The run continues.")


def scale(arguments: list[str]) -> int:
    """Run `rlframe scale` and return its exit code."""
    prog = "rlframe scale"
    description = "Set the number of workers of a run with the elastic topology: `rlframe scale RUN_DIR collector 4`."
    options = parse(ScaleOptions, arguments, prog, description)
    words = options.words[1:] if options.run_dir is not None else options.words
    role, number = (*words, "", "")[:2]
    if role not in ROLES:
        problem = f"{role!r} is not a role" if role else "Name a role and a number"
        raise UsageError(f"{problem}; roles are {', '.join(ROLES)}.{suggest(role, ROLES)}")
    if not number.isdecimal() or len(words) > 2:
        raise UsageError(f"Give the number of workers: {prog} [RUN_DIR] {role} N.")
    message = f"The run will have {number} workers of the role {role}."
    return _call(prog, options, lambda client: client.scale(role, int(number)), message)


def _call(prog: str, options: Any, call: Callable[[ControlClient], Any], message: str) -> int:
    """Make one call to the coordinator of a run, and print the message. Return the exit code."""
    check_one_run_is_named(options)
    if options.run_dir is not None:
        _check_is_active(options.run_dir, prog)
    with connect(options, prog) as client:
        call(client)
    print(json.dumps({"status": "ok"}) if options.json else message)
    return 0


def _check_is_active(run_dir: str, prog: str) -> None:
    """Raise `UsageError` if the run in a directory has no coordinator or is not active."""
    from rlframe.programs.run_dir.lock import holder_of
    from rlframe.programs.run_dir.status import topology_of

    topology = topology_of(run_dir)
    if topology not in (None, "elastic"):
        raise UsageError(f"`{prog}` needs the topology elastic, but the run in {run_dir} has the topology {topology}.")
    if topology is not None and holder_of(pathlib.Path(run_dir)) is None:
        job = file_status_reader(run_dir)()["job"]
        raise UsageError(
            f"The run in {run_dir} is not active ({job['state']} at {job['env_steps']:,} env steps: {job['reason']}). "
            f"`{prog}` needs an active run."
        )


# --- rlframe stop


@dataclasses.dataclass(frozen=True)
class StopOptions(RunOptions):
    """Options of `rlframe stop`."""

    reason: str = "stopped by the user"  # reason that the status of an elastic run shows after the stop
    within: float = 60.0  # seconds to wait for the end of the run in RUN_DIR


def stop(arguments: list[str]) -> int:
    """Run `rlframe stop` and return its exit code."""
    options = parse(StopOptions, arguments, _STOP, _STOP_DESCRIPTION)
    check_one_run_is_named(options)
    if options.run_dir is None:
        _ask_coordinator_to_stop(options)
        ended = {"status": "ok"}
        message = "The run will stop soon. `rlframe status --watch` shows its progress."
    else:
        ended, message = _stop_in_directory(options, options.run_dir)
    print(json.dumps(ended) if options.json else message)
    return 1 if ended["status"] == "failed" else 0


def _ask_coordinator_to_stop(options: Any) -> None:
    with connect(options, _STOP) as client:
        client.cancel(options.reason)


def _stop_in_directory(options: StopOptions, run_dir: str) -> tuple[dict[str, Any], str]:
    """End the run in a directory. Return the outcome and the saved checkpoint, as a JSON object and as a sentence."""
    from rlframe.programs.run_dir.directory import RUN, RunDir
    from rlframe.programs.run_dir.lock import holder_of

    directory = RunDir(run_dir)
    holder = holder_of(directory.path)
    if holder is None or directory.kind is None:
        directory.check_kind()
    if holder is None:
        job = file_status_reader(run_dir)()["job"]
        raise UsageError(f"The run in {run_dir} has already ended ({job['state']}: {job['reason']}).")
    _end_process(options, run_dir, holder)
    if directory.kind != RUN:
        saved = f"The progress of all runs is saved. Resume with: {directory.resume_command}"
        return {"status": "ok", "saved": saved}, f"The runs have ended. {saved}"
    saved = directory.describe_checkpoint()
    try:
        job = file_status_reader(run_dir)()["job"]
    except UsageError:  # the run has not written its status yet
        return {"status": "ok", "saved": saved}, f"The run was still starting, and has ended. {saved}"
    status = "failed" if job["state"] == "FAILED" else "ok"
    at = f"{job['env_steps']:,} {job.get('unit') or 'env steps'}"
    message = f"The run has ended at {at} ({job['state']}: {job['reason']}). {saved}"
    return {"status": status, "state": job["state"], "reason": job["reason"], "saved": saved}, message


def _end_process(options: StopOptions, run_dir: str, holder: Holder) -> None:
    """Ask the run's coordinator to stop, or send a signal to the process that uses the directory. Wait for the end."""
    from rlframe.programs.run_dir.lock import holder_of

    path = pathlib.Path(run_dir)
    try:
        if has_reachable_coordinator(run_dir):
            _ask_coordinator_to_stop(options)
        else:
            holder.terminate()
    except (PeerError, UnavailableError):  # the coordinator does not answer
        if holder_of(path) == holder:
            holder.terminate()
    deadline = time.monotonic() + options.within
    while holder_of(path) == holder:
        if time.monotonic() > deadline:
            raise PeerError(f"The run in {run_dir} did not end within {options.within:g} s: {holder} is still running.")
        time.sleep(_POLL)
