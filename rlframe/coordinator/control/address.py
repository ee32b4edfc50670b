"""The address of a run's control: `RUN_DIR/control.json`, for programs on the same machine.

    {"version": 1, "url": "http://127.0.0.1:40123", "token_file": "/.../token" or null, "pid": 1234}

The process that serves the control writes it once it answers, and removes it when it ends. If that process is killed,
the file stays: `pid` is of no process then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
from typing import Any

from rlframe.errors import UsageError
from rlframe.interprocess.files import write_atomically

_VERSION = 1


@dataclasses.dataclass(frozen=True)
class ControlFile:
    """The content of the file."""

    url: str
    token_file: str | None  # its path
    pid: int  # of the process that serves it


def control_file(run_dir: str | os.PathLike) -> pathlib.Path:
    """Return the path of the file."""
    return pathlib.Path(run_dir) / "control.json"


def final_status_file(run_dir: str | os.PathLike) -> pathlib.Path:
    """Return the path of a job's last status, which the coordinator writes when the job is over."""
    return pathlib.Path(run_dir) / "coordinator" / "status.json"


def read_final_status(run_dir: str | os.PathLike) -> dict[str, Any] | None:
    """Return the last status of a run that is over.

    None if there is none that can be read, or if the run's control is newer: it may continue.
    """
    try:
        status = json.loads(final_status_file(run_dir).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(status, dict) or not isinstance(status.get("job"), dict):
        return None
    with contextlib.suppress(OSError):
        if control_file(run_dir).stat().st_mtime_ns > final_status_file(run_dir).stat().st_mtime_ns:
            return None
    return status


def make_token_file(run_dir: str | os.PathLike) -> str:
    """Return the path of the run's token file. Make it, for its owner alone, with a new secret if there is none."""
    path = pathlib.Path(run_dir) / "token"
    if not path.exists():
        write_atomically(path, secrets.token_urlsafe(24), "\n", parents=True, mode=0o600)
    return str(path.absolute())


def write_control(run_dir: str | os.PathLike, url: str, token_file: str | None) -> None:
    """Write the file, atomically."""
    path = control_file(run_dir)
    known = ControlFile(url, None if token_file is None else os.path.abspath(token_file), os.getpid())
    write_atomically(
        path, json.dumps({"version": _VERSION, **dataclasses.asdict(known)}), "\n", parents=True, mode=0o600
    )


def remove_control(run_dir: str | os.PathLike) -> None:
    """Remove the file if this process wrote it: another process may soon have its port."""
    with contextlib.suppress(UsageError):
        if read_control(run_dir).pid == os.getpid():
            control_file(run_dir).unlink(missing_ok=True)


def read_control(run_dir: str | os.PathLike) -> ControlFile:
    """Read the file. Raise `UsageError` if the run has none, or it is not valid."""
    path = control_file(run_dir)
    try:
        read = json.loads(path.read_text())
        if read["version"] != _VERSION:
            raise ValueError(f"it is of version {read['version']}, and {_VERSION} is known")
        return ControlFile(str(read["url"]), read["token_file"], int(read["pid"]))
    except FileNotFoundError:
        raise UsageError(
            f"There is no {path}: the run in {os.fspath(run_dir)} has no control, has not begun, or is over (then "
            "`rlframe status` shows its last status). Start it by `rlframe train --http 0`."
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not what a run writes there: {error}. Name the service by --url.") from error
