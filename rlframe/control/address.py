"""The address of a run's control API: `RUN_DIR/control.json`, for programs on the same machine.

    {"version": 1, "url": "http://127.0.0.1:40123", "token_file": "/.../token" or null, "pid": 1234}

The process that serves the API writes the file when the server is ready, and removes it at exit. If that process is
killed, the file remains, and no process with this `pid` exists.
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
    """The content of `control.json`."""

    url: str
    token_file: str | None  # path of the token file; None if no token is required
    pid: int  # process that serves the API


def control_file(run_dir: str | os.PathLike) -> pathlib.Path:
    """Return the path of `control.json`."""
    return pathlib.Path(run_dir) / "control.json"


def final_status_file(run_dir: str | os.PathLike) -> pathlib.Path:
    """Return the path of the file with a job's final status. The coordinator writes this file when the job is over."""
    return pathlib.Path(run_dir) / "coordinator" / "status.json"


def read_final_status(run_dir: str | os.PathLike) -> dict[str, Any] | None:
    """Return the final status of a run that is over.

    Return None if the file is missing or damaged. Also return None if `control.json` is newer: the run may have been
    resumed.
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
    """Return the path of the run's token file. Create the file if it is missing. Only this user can read it."""
    path = pathlib.Path(run_dir) / "token"
    if not path.exists():
        write_atomically(path, secrets.token_urlsafe(24), "\n", parents=True, mode=0o600)
    return str(path.absolute())


def write_control(run_dir: str | os.PathLike, url: str, token_file: str | None) -> None:
    """Write `control.json` atomically."""
    path = control_file(run_dir)
    known = ControlFile(url, None if token_file is None else os.path.abspath(token_file), os.getpid())
    write_atomically(
        path, json.dumps({"version": _VERSION, **dataclasses.asdict(known)}), "\n", parents=True, mode=0o600
    )


def remove_control(run_dir: str | os.PathLike) -> None:
    """Remove `control.json` if this process wrote it, because another program may use the port later."""
    with contextlib.suppress(UsageError):
        if read_control(run_dir).pid == os.getpid():
            control_file(run_dir).unlink(missing_ok=True)


def read_control(run_dir: str | os.PathLike) -> ControlFile:
    """Return the content of `control.json`. Raise `UsageError` if the file is missing or invalid."""
    path = control_file(run_dir)
    try:
        read = json.loads(path.read_text())
        if read["version"] != _VERSION:
            raise ValueError(f"its version is {read['version']}, expected {_VERSION}")
        return ControlFile(str(read["url"]), read["token_file"], int(read["pid"]))
    except FileNotFoundError:
        raise UsageError(
            f"There is no {path}: the run in {os.fspath(run_dir)} has no control API, has not started, or is over. "
            "`rlframe status` shows the last status of a run that is over. Start a run with `rlframe train --http 0`."
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a valid control file: {error}. Name the service by --url.") from error
