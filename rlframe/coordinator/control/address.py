"""Where the control of a run is: `RUN_DIR/control.json`, for programs on the same machine.

That of a queue of runs is `RUNS/control.json`.

    {"version": 1, "url": "http://127.0.0.1:40123", "token_file": "/.../token" or null, "pid": 1234}

It is written by who serves the control, once it answers, and removed when that ends; it stays behind where that is
killed: `pid` tells.
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

_VERSION = 1


@dataclasses.dataclass(frozen=True)
class ControlAddress:
    """What the file holds."""

    url: str
    token_file: str | None  # its path
    pid: int  # of who serves it


def control_file(run_dir: str | os.PathLike) -> pathlib.Path:
    """The path of the file."""
    return pathlib.Path(run_dir) / "control.json"


def status_file(run_dir: str | os.PathLike) -> pathlib.Path:
    """The path of what a job's status was when it was over; the coordinator writes it then."""
    return pathlib.Path(run_dir) / "coordinator" / "status.json"


def read_last_status(run_dir: str | os.PathLike) -> dict[str, Any] | None:
    """The status of a job that is over; None where there is none that can be read."""
    try:
        read = json.loads(status_file(run_dir).read_text())
    except (OSError, ValueError):
        return None
    return read if isinstance(read, dict) and isinstance(read.get("job"), dict) else None


def queue_file(runs: str | os.PathLike) -> pathlib.Path:
    """As `control_file`, of the queue in a directory."""
    return pathlib.Path(runs) / "control.json"


def status_when_over(run_dir: str | os.PathLike) -> dict[str, Any] | None:
    """The last status of a run that is over; None where its control is newer, so that the run may go on."""
    status = read_last_status(run_dir)
    if status is None:
        return None
    with contextlib.suppress(OSError):
        if control_file(run_dir).stat().st_mtime_ns > status_file(run_dir).stat().st_mtime_ns:
            return None
    return status


def make_token(run_dir: str | os.PathLike) -> str:
    """The path of the run's token file, with a new secret in it where there was none. Only its owner may read it."""
    return _make_token(control_file(run_dir))


def make_queue_token(runs: str | os.PathLike) -> str:
    """As `make_token`, of the queue in a directory."""
    return _make_token(queue_file(runs))


def write_control(run_dir: str | os.PathLike, url: str, token_file: str | None) -> None:
    """Writes the file, in one piece."""
    _write_address(control_file(run_dir), url, token_file)


def write_queue(runs: str | os.PathLike, url: str, token_file: str | None) -> None:
    """As `write_control`, of the queue in a directory."""
    _write_address(queue_file(runs), url, token_file)


def remove_control(run_dir: str | os.PathLike) -> None:
    """Removes what this process wrote: its port may be another's soon. What another one has written stays."""
    _remove(control_file(run_dir))


def remove_queue(runs: str | os.PathLike) -> None:
    """As `remove_control`, of the queue in a directory."""
    _remove(queue_file(runs))


def read_control(run_dir: str | os.PathLike) -> ControlAddress:
    """Raises `UsageError` where the run has no such file, or it is no such file."""
    path = control_file(run_dir)
    return _read(
        path,
        f"There is no {path}: the run in {os.fspath(run_dir)} has no control, has not begun, or is over (then "
        "`rlframe status` shows its last status). Start it by `rlframe train --http 0`.",
    )


def read_queue(runs: str | os.PathLike) -> ControlAddress:
    """As `read_control`, of the queue in a directory."""
    path = queue_file(runs)
    return _read(
        path,
        f"There is no {path}: no `rlframe serve coordinator --runs {os.fspath(runs)}` runs. (One run's directory is "
        "named without --runs, as RUN_DIR.)",
    )


def _make_token(beside: pathlib.Path) -> str:
    path = beside.with_name("token")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        _write(path, secrets.token_urlsafe(24) + "\n")
    return str(path.absolute())


def _write_address(path: pathlib.Path, url: str, token_file: str | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    known = ControlAddress(url, None if token_file is None else os.path.abspath(token_file), os.getpid())
    _write(path, json.dumps({"version": _VERSION, **dataclasses.asdict(known)}) + "\n")


def _remove(path: pathlib.Path) -> None:
    with contextlib.suppress(UsageError):
        if _read(path, "There is none.").pid == os.getpid():
            path.unlink(missing_ok=True)


def _read(path: pathlib.Path, missing: str) -> ControlAddress:
    try:
        read = json.loads(path.read_text())
        if read["version"] != _VERSION:
            raise ValueError(f"it is of version {read['version']}, and {_VERSION} is known")
        return ControlAddress(str(read["url"]), read["token_file"], int(read["pid"]))
    except FileNotFoundError:
        raise UsageError(missing) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not what a run writes there: {error}. Name the service by --url.") from error


def _write(path: pathlib.Path, content: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)
    os.replace(temporary, path)
