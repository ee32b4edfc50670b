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
    """The address of the HTTP service of a run; see docs/coordinator.md."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: one that is free
    token_file: str | None = None  # None: one that is made in the run's directory


class LocalRunTarget:
    """The status and the commands of a run without a coordinator; it is in the process that runs it.

    Args:
        run_dir: of the run.
    """

    def __init__(self, run_dir: pathlib.Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()  # of the reader
        self._reader: StatusReader | None = None
        self._is_told = False

    def status(self) -> dict[str, Any]:
        """As `rlframe status` gives it."""
        try:
            with self._lock:
                self._reader = self._reader or StatusReader(self._run_dir)
                return self._reader()
        except UsageError as error:
            raise UnavailableError(f"The run begins: {error}") from error

    def events(self, since: int, timeout: float = 0.0) -> list[dict[str, Any]]:
        """Return none: nothing keeps events."""
        return []

    def cancel(self, reason: str = "") -> None:
        """End the run as Ctrl-C does. Send SIGTERM once: a second one would end the run unsaved."""
        if not self._is_told and self.status()["job"]["state"] not in OVER:
            self._is_told = True
            os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def serve_run_control(
    run_dir: pathlib.Path, address: ControlAddress | None, coordinator: Any = None, quiet: bool = False
) -> Iterator[None]:
    """Serve the control of a run in this process, and write the address into its directory. Do nothing for None.

    Args:
        run_dir: of the run.
        address: where; None: nowhere.
        coordinator: its coordinator, or a handle to it; None: it has none.
        quiet: do not print where it is.

    Raises:
        UsageError: it cannot be served there, or a package is missing.
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
        # If it is no terminal, others may read the output.
        link = f"{server.url}/#token={read_token(token_file)}" if sys.stderr.isatty() else server.url
        if not quiet:
            print(f"[launcher] live page and control: {link} (token: {token_file})", file=sys.stderr)
        try:
            yield
        finally:
            remove_control(run_dir)
