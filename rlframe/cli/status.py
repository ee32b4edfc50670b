"""The command `rlframe status`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

from rlframe.cli.parsing import parse
from rlframe.cli.run_control import (
    RunOptions,
    check_one_run_is_named,
    connect,
    file_status_reader,
    has_reachable_coordinator,
)
from rlframe.errors import PeerError, UnavailableError, UsageError
from rlframe.metrics.terminal import console, format_number, table

PROG = "rlframe status"
DESCRIPTION = "Show the state, progress and processes of a run."
_OVER = ("CLOSED", "FAILED")
_STATES = {  # maps each state of a run to the text that users see
    "INIT": "starting",
    "CONNECTING": "starting",
    "WAITING": "starting (waiting for a learner)",
    "RUNNING": "running",
    "DEGRADED": "running (the learner is being replaced)",
    "PAUSED": "paused",
    "DRAINING": "stopping",
    "CLOSED": "over",
    "FAILED": "failed",
}
ReadStatus = Callable[[], dict[str, Any]]

_AWAY = 60.0  # seconds that --watch keeps trying to reach an HTTP service


@dataclasses.dataclass(frozen=True)
class StatusOptions(RunOptions):
    """Options of `rlframe status`."""

    watch: bool = False  # refresh the status until the run ends
    interval: float = 1.0  # seconds between refreshes with --watch


def run(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    options = parse(StatusOptions, arguments, PROG, DESCRIPTION)
    if not 0.1 <= options.interval <= 3600.0:
        raise UsageError(f"--interval must be between 0.1 and 3600 seconds, got {options.interval:g}.")
    check_one_run_is_named(options)
    with contextlib.ExitStack() as opened:
        if options.run_dir is None:
            read_status = opened.enter_context(connect(options, PROG)).status
        else:
            read_status = _status_reader(options, options.run_dir, opened)
        if options.watch:
            _watch(read_status, options)
        elif options.json:
            print(json.dumps(read_status()))
        else:
            console(sys.stdout).print(_shown(read_status()))
    return 0


def _status_reader(options: StatusOptions, run_dir: str, opened: contextlib.ExitStack) -> ReadStatus:
    """Return a function that reads a run's status: from the coordinator if it can be reached, else from files."""
    from rlframe.programs.run_dir.lock import holder_of

    directory = pathlib.Path(run_dir)
    if holder_of(directory) is None or not has_reachable_coordinator(run_dir):
        return file_status_reader(run_dir)
    client = opened.enter_context(connect(options, PROG))

    def read_status() -> dict[str, Any]:
        try:
            return client.status()
        except (UnavailableError, PeerError):
            if holder_of(directory) is not None:
                raise
            return file_status_reader(run_dir)()  # the run has ended

    return read_status


def _watch(read_status: ReadStatus, options: StatusOptions) -> None:
    """Show the status until the run ends. If the HTTP service does not answer, retry: it may be restarting."""
    from rich.live import Live

    screen = console(sys.stdout)
    live = Live(console=screen, auto_refresh=False) if sys.stdout.isatty() and not options.json else None
    away_since: float | None = None
    seen = False
    try:
        if live is not None:
            live.start()
        while True:
            try:
                status = read_status()
            except (UnavailableError, PeerError) as error:
                away_since = away_since or time.monotonic()
                if not seen or time.monotonic() - away_since > _AWAY:
                    raise
                print(f"rlframe: {error}", file=sys.stderr)
            else:
                seen, away_since = True, None
                if options.json:
                    print(json.dumps(status), flush=True)
                elif live is not None:
                    live.update(_shown(status), refresh=True)
                else:
                    screen.print(_shown(status))
                if status["job"]["state"] in _OVER:
                    return
            time.sleep(options.interval)
    finally:
        if live is not None:
            live.stop()


def _shown(status: dict[str, Any]) -> Any:
    """Format a status for users."""
    from rich.console import Group

    parts = _lines(status, status["job"])
    if status["workers"]:
        parts += ["", _workers(status["workers"])]
    return Group(*parts)


def _lines(status: dict[str, Any], job: dict[str, Any]) -> list[Any]:
    from rich.text import Text

    waits, unit = job.get("waits_for"), job.get("unit") or "env steps"
    state = _STATES.get(job["state"], job["state"]) + (f": {job['reason']}" if job.get("reason") else "")
    if waits and job["state"] == "RUNNING":
        state += f" (waiting for {waits})"
    lines = [f"{job.get('agent')} on {job.get('env')}   {state}"]
    if job.get("until"):
        left = ""
        if job["state"] == "RUNNING" and job.get("env_steps_per_second"):
            left = f", about {_duration((job['until'] - job['env_steps']) / job['env_steps_per_second'])} left"
        percent = min(100.0, 100.0 * job["env_steps"] / job["until"])
        lines.append(f"{unit:14} {job['env_steps']:,} of {job['until']:,} ({percent:.1f} %{left})")
        steps = f"{_number(job, 'env_steps_per_second')} {unit}/s"
        if "updates_per_second" in job:
            steps += f", {_number(job, 'updates_per_second')} updates/s"
        lines.append(f"rates          {steps}")
        evaluated = f" of version {job['evaluated_version']}" if job.get("evaluated_version") is not None else ""
        training, evaluation = _number(job, "return_mean"), _number(job, "eval_return")
        lines.append(f"returns        {training} in training, {evaluation} in evaluation{evaluated}")
        version, updates = job.get("params_version"), job.get("learner_steps") or 0
        stale = _number(job, "staleness")
        lines.append(f"policy         version {version} after {updates:,} updates, staleness {stale}")
        restarts = f"{job.get('restarts', 0)} of workers"
        if "retries" in job:
            restarts += f", {job['retries']} of tasks, {job['coordinator_restarts']} of the coordinator"
        lines.append(f"restarts       {restarts}")
    if status.get("wanted"):
        limits = (status.get("limits") or {}).get("collector")
        between = f" (collectors: {limits[0]} to {limits[1]}, {status.get('scaling')})" if limits else ""
        lines.append("wanted         " + ", ".join(f"{n} {role}" for role, n in status["wanted"].items()) + between)
    operator = status.get("operator") or {}
    if operator.get("connected") is False:
        lines.append(f"operator       {operator.get('kind')} cannot be reached: {operator.get('problem')}")
    lines.append(f"run            {job.get('run_dir')}")
    # Text objects, because a reason may contain characters that rich would interpret as markup.
    return [Text(line) for line in lines]


def _workers(workers: list[dict[str, Any]]) -> Any:
    """Return a table of the workers. Leave out columns that are empty for all workers."""
    shown = {name: [read(one) for one in workers] for name, read in _COLUMNS.items()}
    shown = {name: cells for name, cells in shown.items() if name == "worker" or any(cell != "-" for cell in cells)}
    return table(shown, zip(*shown.values()))


_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "worker": lambda one: one["worker_id"],
    "state": lambda one: one["state"],
    "incarnation": lambda one: str(one.get("incarnation", "-")),
    "task": lambda one: one.get("task_id") or "-",
    "phase": lambda one: one.get("phase") or "-",
    "silent for": lambda one: "-" if one.get("silent_for") is None else f"{one['silent_for']:.1f} s",
    "env steps": lambda one: "-" if one.get("env_steps") is None else f"{one['env_steps']:,}",
    "steps/s": lambda one: _number(one, "env_steps_per_second"),
    "return": lambda one: _number(one, "return_mean"),
    "version": lambda one: "-" if one.get("params_version") is None else str(one["params_version"]),
    "process": lambda one: f"{one['host']}:{one['pid']}" if one.get("pid") else "-",
}


def _number(values: dict[str, Any], key: str) -> str:
    return format_number(values.get(key))


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
