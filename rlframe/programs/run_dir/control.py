"""The HTTP service of a run: its status, /metrics, /healthz, a live page, and commands."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from rlframe import extras
from rlframe.errors import UnavailableError, UsageError
from rlframe.programs.run_dir.status import OVER, StatusReader


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
    """

    def __init__(self, run_dir: pathlib.Path) -> None:
        self._run_dir = run_dir
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
            self._is_stopping = True
            os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def serve_run_control(
    run_dir: pathlib.Path, address: ControlAddress | None, coordinator: Any = None, quiet: bool = False
) -> Iterator[None]:
    """Serve the HTTP service of a run in this process, and write its address to the run's directory.

    Args:
        run_dir: directory of the run.
        address: address of the service. None means no service.
        coordinator: the run's coordinator or a handle to the coordinator. None means that the run has no coordinator.
        quiet: if True, do not print the address.

    Raises:
        UsageError: the address cannot be used, or a package is missing.
    """
    if address is None:
        yield
        return
    from rlframe.coordinator.control.address import make_token_file, remove_control, write_control

    with extras.explain_import_error("--http", "trajectories"):
        from rlframe.coordinator.control.app import COORDINATOR, RUN, serve_control
        from rlframe.http.config import read_token
    token_file = address.token_file or make_token_file(run_dir)
    target, kind = (LocalRunTarget(run_dir), RUN) if coordinator is None else (coordinator, COORDINATOR)
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
