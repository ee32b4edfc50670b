"""A Reverb server that saves checkpoints, and restores the newest checkpoint after a restart."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import shutil
import threading
from collections.abc import Callable
from typing import Any

from rlframe import extras
from rlframe.interprocess.files import NativePath
from rlframe.interprocess.heartbeat import SAVING
from rlframe.replay.replay_files import save_periodically
from rlframe.shutdown import stop_with_program

with extras.explain_import_error("--replay reverb", "reverb"):
    import reverb

_log = logging.getLogger(__name__)


class ReverbServer:
    """A Reverb server with checkpoints. If the server dies, the items since the latest checkpoint are lost.

    The server listens on all interfaces, without authentication.

    Args:
        tables: function that creates the tables, such as `ReverbReplayBuffer.tables(agent)`.
        directory: directory of the newest checkpoint on this machine. The server restores this checkpoint.
        port: port of the server.
        seconds: seconds between checkpoints. If a checkpoint takes more than 5 % of the interval, the interval grows.
        at_end: seconds that the last checkpoint may take when the program stops.
    """

    def __init__(
        self,
        tables: Callable[[], list[Any]],
        directory: str | os.PathLike,
        port: int,
        seconds: float = 30.0,
        at_end: float = 4.0,
    ) -> None:
        self._directory, self._seconds, self._at_end = pathlib.Path(directory).absolute(), seconds, at_end
        self._stop = threading.Event()
        self._directory.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(self._directory)
        self._native = NativePath(self._directory)  # keep this object, because the server needs the path
        checkpointer = reverb.checkpointers.DefaultCheckpointer(self._native.path)
        self._server = reverb.Server(tables(), port, checkpointer)

    def run(self) -> None:
        """Save periodically until the program ends or `stop` is called. Then save a last time."""
        write = functools.partial(_save, self._server.localhost_client(), self._directory)
        with stop_with_program(self.stop):
            save_periodically(write, self._stop, self._seconds, self._at_end)

    def stop(self) -> None:
        """End `run`."""
        self._stop.set()


def _save(client: Any, directory: pathlib.Path) -> None:
    """Write a checkpoint. Log a warning if it fails."""
    try:
        with SAVING:
            client.checkpoint()
    except RuntimeError as error:  # continue, because the items are still in memory
        _log.warning("The Reverb server could not write a checkpoint to %s: %s", directory, error)
        _remove_unfinished(directory)


def _remove_unfinished(directory: pathlib.Path) -> None:
    """Remove unfinished checkpoints, because Reverb does not remove them."""
    for path in directory.iterdir():
        if path.is_dir() and not (path / "DONE").exists():
            shutil.rmtree(path)
