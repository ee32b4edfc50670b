"""A Reverb server that saves checkpoints, and continues from the newest one when it is started again."""

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
from rlframe.interprocess.phases import SAVING
from rlframe.replay.replay_files import save_periodically
from rlframe.shutdown import stop_with_program

with extras.explain_import_error("--replay reverb", "reverb"):
    import reverb

_log = logging.getLogger(__name__)


class ReverbServer:
    """A server with checkpoints: a server that dies loses the items of the last `seconds`, or little more.

    It listens on all interfaces, without authentication.

    Args:
        tables: makes the tables, as `ReverbReplayBuffer.tables(agent)` does.
        directory: where the newest checkpoint is, on this machine. A server that starts reads it.
        port: at which it listens.
        seconds: between two checkpoints; longer where one takes more than a twentieth of that.
        at_end: seconds that one may take when the program stops.
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
        self._native = NativePath(self._directory)  # open as long as the server is
        checkpointer = reverb.checkpointers.DefaultCheckpointer(self._native.path)
        self._server = reverb.Server(tables(), port, checkpointer)

    def run(self) -> None:
        """Save now and then, until the program ends or `stop` is called, and once more then."""
        write = functools.partial(_save, self._server.localhost_client(), self._directory)
        with stop_with_program(self.stop):
            save_periodically(write, self._stop, self._seconds, self._at_end)

    def stop(self) -> None:
        """End `run`."""
        self._stop.set()


def _save(client: Any, directory: pathlib.Path) -> None:
    """Write a checkpoint; warn if that is not possible."""
    try:
        with SAVING:
            client.checkpoint()
    except RuntimeError as error:  # it still has everything in memory: better than to end here
        _log.warning("The Reverb server could not write a checkpoint to %s: %s", directory, error)
        _remove_unfinished(directory)


def _remove_unfinished(directory: pathlib.Path) -> None:
    """Remove checkpoints that were cut off: Reverb never removes them."""
    for path in directory.iterdir():
        if path.is_dir() and not (path / "DONE").exists():
            shutil.rmtree(path)
