"""`rlframe stop`."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from typing import TYPE_CHECKING, Any

from rlframe.cli.control import RunOptions, check_names_one_run, connected, is_steered, status_by_files
from rlframe.cli.parsing import parse
from rlframe.errors import PeerError, UnavailableError, UsageError

if TYPE_CHECKING:
    from rlframe.programs.run_lock import Holder

PROG = "rlframe stop"
DESCRIPTION = (
    "End a run in good order, as Ctrl-C does: what is under way is taken to its end and everything is saved, without a "
    "last evaluation. Waits for the end of the run (of `--seeds` or of a sweep: all runs) in RUN_DIR, and says what is "
    "saved."
)
_LOOK = 0.1  # seconds between two looks whether it has ended


@dataclasses.dataclass(frozen=True)
class StopOptions(RunOptions):
    """Options of `rlframe stop`."""

    reason: str = "stopped by hand"  # what the state of an elastic run says from then on
    within: float = 60.0  # seconds to wait for the end of the run in RUN_DIR


def run(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    options = parse(StopOptions, arguments, PROG, DESCRIPTION)
    check_names_one_run(options)
    if options.run_dir is None:
        _cancel(options)
        ended = {"status": "ok"}
        told = "It is told to stop; `rlframe status --watch` shows its end."
    else:
        ended, told = _stop(options, options.run_dir)
    print(json.dumps(ended) if options.json else told)
    return 1 if ended["status"] == "failed" else 0


def _cancel(options: Any) -> None:
    with connected(options, PROG) as client:
        client.cancel(options.reason)


def _stop(options: StopOptions, run_dir: str) -> tuple[dict[str, Any], str]:
    """End what runs in a directory, and return how it ended and what is saved: as an object, and for a person."""
    from rlframe.programs.run_dir import RUN, RunDir
    from rlframe.programs.run_lock import holder_of

    directory = RunDir(run_dir)
    holder = holder_of(directory.path)
    if holder is None or directory.holds is None:
        directory.check_holds_run()
    if holder is None:
        job = status_by_files(run_dir)()["job"]
        raise UsageError(f"The run in {run_dir} is over ({job['state']}: {job['reason']}): there is nothing to stop.")
    _end(options, run_dir, holder)
    if directory.holds != RUN:
        saved = f"What its runs did is saved. Go on: {directory.resume_command}"
        return {"status": "ok", "saved": saved}, f"It has ended. {saved}"
    job, saved = status_by_files(run_dir)()["job"], directory.what_is_saved()
    status = "failed" if job["state"] == "FAILED" else "ok"
    at = f"{job['env_steps']:,} {job.get('unit') or 'env steps'}"
    told = f"It has ended at {at} ({job['state']}: {job['reason']}). {saved}"
    return {"status": status, "state": job["state"], "reason": job["reason"], "saved": saved}, told


def _end(options: StopOptions, run_dir: str, holder: Holder) -> None:
    """End the process that holds a directory."""
    from rlframe.programs.run_lock import holder_of

    path = pathlib.Path(run_dir)
    try:
        if is_steered(run_dir):
            _cancel(options)
        else:
            holder.terminate()
    except (PeerError, UnavailableError):  # nobody is there to take it in its own way
        if holder_of(path) == holder:
            holder.terminate()
    deadline = time.monotonic() + options.within
    while holder_of(path) == holder:
        if time.monotonic() > deadline:
            raise PeerError(f"The run in {run_dir} has not ended within {options.within:g} s; {holder} goes on.")
        time.sleep(_LOOK)
