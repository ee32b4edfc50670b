"""`rlframe status`."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

from rlframe.cli.control import ControlOptions, connected
from rlframe.cli.parsing import parse
from rlframe.cli.tables import console
from rlframe.errors import PeerError, UnavailableError, UsageError

PROG = "rlframe status"
DESCRIPTION = "Show how a run under a coordinator is: its state, its progress, and every worker."
_OVER = ("CLOSED", "FAILED")
_AWAY = 60.0  # seconds for which --watch waits for a control that does not answer


@dataclasses.dataclass(frozen=True)
class Options(ControlOptions):
    """What `rlframe status` takes."""

    watch: bool = False  # show it again and again, until the run is over
    interval: float = 1.0  # seconds between two looks, with --watch


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit code."""
    options = parse(Options, arguments, PROG, DESCRIPTION)
    if not 0.1 <= options.interval <= 3600.0:
        raise UsageError(f"--interval must be between 0.1 and 3600 seconds, got {options.interval:g}.")
    if options.url is None and options.runs is None and _show_last(options):
        return 0
    with connected(options) as client:
        if options.watch:
            _watch(client, options)
        elif options.json:
            print(json.dumps(client.status()))
        else:
            console(sys.stdout).print(_shown(client.status()))
    return 0


def _show_last(options: Options) -> bool:
    """Shows the last status of a run that is over; False where there is none."""
    from rlframe.coordinator.control.address import status_when_over

    status = None if options.run_dir is None else status_when_over(options.run_dir)
    if status is None:
        return False
    print(f"rlframe: The run in {options.run_dir} is over; this is its last status.", file=sys.stderr)
    if options.json:
        print(json.dumps(status))
    else:
        console(sys.stdout).print(_shown(status))
    return True


def _watch(client: Any, options: Options) -> None:
    """Until the run is over. A control that does not answer is waited for: it may be restarting."""
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
                status = client.status()
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
                if (status.get("job") or {}).get("state") in _OVER and "jobs" not in status:
                    return
            time.sleep(options.interval)
    finally:
        if live is not None:
            live.stop()


def _shown(status: dict[str, Any]) -> Any:
    """What a person reads."""
    from rich.console import Group

    job = status.get("job")
    parts: list[Any] = [] if job else ["No job runs."]
    if job:
        parts += [*_lines(status, job), "", _workers(status.get("workers") or [])]
    if status.get("jobs"):
        parts += ["", _jobs(status["jobs"])]
    return Group(*parts)


def _lines(status: dict[str, Any], job: dict[str, Any]) -> list[Any]:
    from rich.text import Text

    waits = job.get("waits_for")
    state = f"{job['state']}" + (f": {job['reason']}" if job.get("reason") else "")
    if waits and job["state"] == "RUNNING":
        state += f" (waits for {waits})"
    lines = [f"{job.get('agent')} on {job.get('env')}   {state}"]
    if job.get("until"):
        left = ""
        if job["state"] == "RUNNING" and job.get("env_steps_per_second"):
            left = f", about {_duration((job['until'] - job['env_steps']) / job['env_steps_per_second'])} left"
        lines.append(f"env steps      {job['env_steps']:,} of {job['until']:,} ({_percent(job)} %{left})")
        steps, updates = _number(job, "env_steps_per_second"), _number(job, "updates_per_second")
        lines.append(f"rates          {steps} env steps/s, {updates} updates/s")
        evaluated = f" of version {job['evaluated_version']}" if job.get("eval_return") is not None else ""
        training, evaluation = _number(job, "return_mean"), _number(job, "eval_return")
        lines.append(f"returns        {training} in training, {evaluation} in evaluation{evaluated}")
        lines.append(f"policy         version {job.get('params_version')}, staleness {_number(job, 'staleness')}")
        lines.append(
            f"restarts       {job.get('restarts', 0)} of workers, {job.get('retries', 0)} of tasks, "
            f"{job.get('coordinator_restarts', 0)} of the coordinator"
        )
    if status.get("wanted"):
        limits = (status.get("limits") or {}).get("collector")
        between = f" (collectors: {limits[0]} to {limits[1]}, {status.get('scaling')})" if limits else ""
        lines.append("wanted         " + ", ".join(f"{n} {role}" for role, n in status["wanted"].items()) + between)
    operator = status.get("operator") or {}
    if operator.get("connected") is False:
        lines.append(f"operator       {operator.get('kind')} cannot be reached: {operator.get('problem')}")
    lines.append(f"run            {job.get('run_dir')}")
    # As text: a reason may hold what rich takes for markup.
    return [Text(line) for line in lines]


def _workers(workers: list[dict[str, Any]]) -> Any:
    rows = [
        (
            *(one["worker_id"], one["state"], one.get("incarnation"), one.get("task_id") or "-"),
            *(f"{one.get('silent_for') or 0:.1f} s", f"{one.get('env_steps') or 0:,}", _number(one, "return_mean")),
            "-" if one.get("params_version") is None else one["params_version"],
            f"{one['host']}:{one['pid']}" if one.get("pid") else "-",
        )
        for one in workers
    ]
    columns = ("worker", "state", "incarnation", "task", "silent for", "env steps", "return", "version", "process")
    return _table(columns, rows)


def _jobs(jobs: list[dict[str, Any]]) -> Any:
    rows = [(job["id"], job["state"], f"{job['agent']} on {job['env']}", job.get("reason") or "-") for job in jobs]
    return _table(("job", "state", "what", "reason"), rows)


def _table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text("-" if value is None else str(value)) for value in row))
    return table


def _number(values: dict[str, Any], key: str) -> str:
    value = values.get(key)
    return "-" if value is None else f"{value:,.1f}"


def _percent(job: dict[str, Any]) -> str:
    return f"{min(100.0, 100.0 * job['env_steps'] / job['until']):.1f}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
