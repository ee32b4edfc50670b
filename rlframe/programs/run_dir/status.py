"""The status of a run, from `RUN_DIR/status.json` and the rows of its metrics, and the HTTP service that shows it.

The run's process writes `status.json`. A reader needs only the directory. A killed process cannot record
in `status.json` that it has ended, so the reader also checks the run's lock.

The HTTP service of a run has its status, /metrics, /healthz, a live page, and commands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlframe import extras
from rlframe.coordinator.states import JobState, WorkerState
from rlframe.engines.base import NodeStatus
from rlframe.errors import UnavailableError, UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.interprocess.heartbeat import COMPILING, STARTING
from rlframe.metrics.files import rows_after
from rlframe.metrics.rows import add_point
from rlframe.programs.experiment import Experiment
from rlframe.programs.run_dir.directory import Result, RunDir
from rlframe.programs.run_dir.lock import Holder, holder_of

if TYPE_CHECKING:
    from rlframe.programs.session import Shared

OVER = (JobState.CLOSED.value, JobState.FAILED.value)

_KEYS = ("learner_steps", "params_version", "staleness")  # values of log rows that a status also contains


class StatusFile:
    """A writer of `status.json` for a session in this process.

    Args:
        directory: directory of the run.
        experiment: experiment of the run.
        until: step at which the session ends.
    """

    def __init__(self, directory: RunDir, experiment: Experiment, until: int) -> None:
        self._path = directory.status
        self._written: dict[str, Any] = {
            "state": JobState.RUNNING.value,
            "reason": "",
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "began": time.time(),
            "agent": experiment.agent,
            "env": experiment.env,
            "topology": experiment.topology_config.name,
            "until": until,
            "unit": experiment.topology_config.unit,
            "nodes": [],
        }
        self.write()

    def write(self, **changes: Any) -> None:
        """Change values in the file, and write it atomically. Ignore errors such as a full disk."""
        self._written = {**self._written, **changes, "time": time.time()}
        with contextlib.suppress(OSError):
            write_atomically(self._path, json.dumps(self._written), "\n")

    def watch(self, stops: bool, nodes: list[NodeStatus]) -> None:
        """Write the states of the program's processes. The supervisor calls this method; see `Watch`."""
        state = JobState.DRAINING if stops else JobState.RUNNING
        self.write(state=state.value, nodes=[_worker_of(node) for node in nodes])

    @contextlib.contextmanager
    def record_failure(self) -> Iterator[None]:
        """If an error ends the `with` block, write the error to the file."""
        try:
            yield
        except BaseException as error:
            reason = str(error).split("\n")[0] or "interrupted"
            self.write(state=JobState.FAILED.value, reason=reason)
            raise

    def end(self, result: Result) -> None:
        """Record that the session ended without an error."""
        if result.signal is None:
            is_early = result.stopped_by == "callback" or result.stopped_by.startswith("until_")
            reason = f"{result.env_steps:,} steps" + f", stopped by {result.stopped_by}" * is_early
        else:
            reason = f"stopped by {signal.Signals(result.signal).name}"
        self.write(state=JobState.CLOSED.value, reason=reason)


def _worker_of(node: NodeStatus) -> dict[str, Any]:
    """Return the status of a node in the format of an elastic worker (`rlframe.coordinator.status`)."""
    role, _, index = node.name.partition("/")
    worker = {
        "worker_id": node.name,
        "role": role,
        "index": int(index or 0),
        "incarnation": node.incarnation,
        "state": {"WAITING": WorkerState.LOST, "ENDED": WorkerState.GONE}.get(node.state, WorkerState.BUSY).value,
        "host": node.host,
        "pid": node.pid,
    }
    return worker if node.phase is None else {**worker, "phase": node.phase, "silent_for": node.silent_for}


def describe_start(nodes: list[NodeStatus]) -> str:
    """Return what the nodes of a program do before the first update, such as "compiling: learner"."""
    for phase in (STARTING, COMPILING):
        groups = dict.fromkeys(node.name.partition("/")[0] for node in nodes if node.phase == phase.name)
        if groups:
            return f"{phase.name}: {', '.join(groups)}"
    return "collecting data for the first update"


def topology_of(run_dir: str | os.PathLike) -> str | None:
    """Return the name of the topology of the run in a directory, or None if it is unknown."""
    try:
        return json.loads(RunDir(run_dir).status.read_text())["topology"]
    except (OSError, ValueError, TypeError, KeyError):
        return None


class StatusReader:
    """A function that reads the current status of a run, in the format of `Coordinator.status`.

    Args:
        run_dir: directory of the run, on this machine or on a shared file system.

    Raises:
        UsageError: the directory contains no run.
    """

    def __init__(self, run_dir: str | os.PathLike) -> None:
        self._directory = RunDir(pathlib.Path(run_dir))
        self._directory.check_kind()
        self._rows = RunRows(self._directory.metrics)

    def __call__(self) -> dict[str, Any]:
        """Read and return the current status."""
        # read the lock first: otherwise, a process that exits between the two reads would seem to have been killed
        holder = holder_of(self._directory.path)
        written, last = self._written(), self._rows.read()
        returns, evaluations = self._rows.returns, self._rows.evaluations
        state, reason = self._state(written, holder, bool(last))
        is_active = state not in OVER
        return {
            "job": {
                "id": self._directory.path.name,
                "agent": written["agent"],
                "env": written["env"],
                "topology": written["topology"],
                "run_dir": str(self._directory.path),
                "until": written["until"],
                "unit": written["unit"],
                "state": state,
                "reason": reason,
                "began": written["began"],
                "seconds": (time.time() if is_active else written["time"]) - written["began"],
                "env_steps": int(last.get("step", 0)),
                **{name: last.get(name) for name in _KEYS},
                "env_steps_per_second": last.get("steps_per_second") if is_active else None,
                "return_mean": returns[-1][1] if returns else None,
                "eval_return": evaluations[-1][1] if evaluations else None,
                "evaluated_version": None,
                "restarts": sum(node["incarnation"] for node in written["nodes"]),
            },
            "commands": ["cancel"],  # commands that the HTTP service accepts
            "workers": written["nodes"] if is_active else [],
            "returns": returns,
            "evaluations": evaluations,
        }

    def _written(self) -> dict[str, Any]:
        path = self._directory.status
        try:
            written = json.loads(path.read_text())
            return {**dict.fromkeys(("agent", "env", "topology", "until", "unit")), "nodes": [], **written}
        except FileNotFoundError:
            raise UsageError(f"There is no {path}: the run in {self._directory.path} has not started.") from None
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"{path} is damaged: {error}.") from error

    def _state(self, written: dict[str, Any], holder: Holder | None, has_rows: bool) -> tuple[str, str]:
        state = written["state"]
        if state in OVER:
            return state, written["reason"]
        # read the lock again, because a process may have started since the first read
        if holder is None and holder_of(self._directory.path) is None:
            return JobState.FAILED.value, f"process {written['pid']} on {written['host']} was killed"
        if state == JobState.RUNNING.value and not has_rows:
            return JobState.INIT.value, ""
        return state, written["reason"]


class RunRows:
    """A reader of the rows of a metrics file. The file grows during a run, and a resume removes its last rows.

    Args:
        path: the file. It need not exist.

    Attributes:
        returns, evaluations: curves of [step, mean]; see `add_point`.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path, self._at = path, 0
        self._forget()

    def read(self) -> dict[str, Any]:
        """Read the new rows. Return the newest value of each name. Return an empty dict if there is no file."""
        try:
            if self._path.stat().st_size < self._at:
                self._forget()
            for row, position in rows_after(self._path, self._at):
                self._at = position
                self._take(row)
        except FileNotFoundError:
            self._forget()
        return self._last

    def _forget(self) -> None:
        self._at = 0
        self._last: dict[str, Any] = {}
        self.returns: list[list[float]] = []
        self.evaluations: list[list[float]] = []

    def _take(self, row: dict[str, Any]) -> None:
        self._last = {**self._last, **row}
        for points, name in ((self.returns, "episode_return"), (self.evaluations, "return_mean")):
            if name in row:
                add_point(points, row["step"], row[name])


@dataclasses.dataclass(frozen=True)
class ControlAddress:
    """The address of the HTTP service of a run; see docs/run/elastic.md."""

    host: str = "127.0.0.1"
    port: int = 0  # 0 means any free port
    token_file: str | None = None  # None creates a token file in the run's directory


class LocalRunTarget:
    """The status and commands of a run in this process, for a run without a coordinator.

    Args:
        run_dir: directory of the run.
        shared: see `Session`.
    """

    def __init__(self, run_dir: pathlib.Path, shared: Shared | None = None) -> None:
        self._run_dir, self._shared = run_dir, shared
        self._lock = threading.Lock()  # protects `_reader`
        self._reader: StatusReader | None = None
        self._is_stopping = False

    def status(self) -> dict[str, Any]:
        """Return the status of the run, as `rlframe status` shows it."""
        try:
            with self._lock:
                self._reader = self._reader or StatusReader(self._run_dir)
                return self._reader()
        except UsageError as error:
            raise UnavailableError(f"The run is starting: {error}") from error

    def events(self, since: int, timeout: float = 0.0) -> list[dict[str, Any]]:
        """Return an empty list: a run without a coordinator records no events."""
        return []

    def cancel(self, reason: str = "") -> None:
        """End the run as Ctrl-C does. Send SIGTERM only once, because a second signal ends the run without a save."""
        if not self._is_stopping and self.status()["job"]["state"] not in OVER:
            if self._shared is None and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                raise UsageError(
                    "This run cannot be stopped: it is not in the main thread of its process, and only the main thread "
                    "receives signals. Stop it in a callback: info.stop()."
                )
            self._is_stopping = True
            if self._shared is None:
                os.kill(os.getpid(), signal.SIGTERM)
            else:  # the runs of other seeds in this process continue
                self._shared.stop.receive(signal.SIGTERM)


@contextlib.contextmanager
def serve_run_control(
    run_dir: pathlib.Path,
    address: ControlAddress | None,
    coordinator: Any = None,
    quiet: bool = False,
    shared: Shared | None = None,
) -> Iterator[None]:
    """Serve the HTTP service of a run in this process, and write its address to the run's directory.

    Args:
        run_dir: directory of the run.
        address: address of the service. None means no service.
        coordinator: the run's coordinator or a handle to the coordinator. None means that the run has no coordinator.
        quiet: if True, do not print the address.
        shared: see `Session`.

    Raises:
        UsageError: the address cannot be used, or a package is missing.
    """
    if address is None:
        yield
        return
    from rlframe.control.address import make_token_file, remove_control, write_control

    with extras.explain_import_error("--http", "trajectories"):
        from rlframe.control.app import COORDINATOR, RUN, serve_control
        from rlframe.http.config import read_token
    token_file = address.token_file or make_token_file(run_dir)
    target, kind = (LocalRunTarget(run_dir, shared), RUN) if coordinator is None else (coordinator, COORDINATOR)
    with serve_control(target, address.host, address.port, token_file, kind=kind) as server:
        write_control(run_dir, server.url, token_file)
        # Print the token only to a terminal, because other users may be able to read a file with the output.
        link = f"{server.url}/#token={read_token(token_file)}" if sys.stderr.isatty() else server.url
        if not quiet:
            print(f"[launcher] live page and control: {link} (token: {token_file})", file=sys.stderr)
        try:
            yield
        finally:
            remove_control(run_dir)
