"""A Reverb server that saves itself, and goes on from what it saved when it is started again."""

from __future__ import annotations

import logging
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

from rlframe import extras
from rlframe.interprocess.progress import SAVING
from rlframe.program_end import stopped_by_program

with extras.needed("--replay reverb", "reverb"):
    import reverb

_SHARE = 0.05  # of the time may go into checkpoints: inserts and samples wait meanwhile

_log = logging.getLogger(__name__)


class ReverbServer:
    """A server with checkpoints: one that dies loses what came in the last `seconds`, or little more.

    It listens on all interfaces, and asks nobody who is calling.

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
        remove_unfinished(self._directory)
        checkpointer = reverb.checkpointers.DefaultCheckpointer(str(self._directory))
        self._server = reverb.Server(tables(), port, checkpointer)

    def run(self) -> None:
        """Saves now and then, until the program ends or `stop` is called, and once more then."""
        client, took = self._server.localhost_client(), 0.0
        with stopped_by_program(self.stop):
            while not self._stop.wait(max(self._seconds, took / _SHARE)):
                took = save(client, self._directory)
        if took < self._at_end:
            save(client, self._directory)

    def stop(self) -> None:
        """Ends `run`."""
        self._stop.set()


def save(client: Any, directory: pathlib.Path) -> float:
    """Has the server write a checkpoint; warns where it cannot. Returns how many seconds that took."""
    began = time.monotonic()
    try:
        with SAVING:
            client.checkpoint()
    except RuntimeError as error:  # it still has everything in memory: better than to end here
        _log.warning("The Reverb server could not write a checkpoint to %s: %s", directory, error)
        remove_unfinished(directory)
    return time.monotonic() - began


def remove_unfinished(directory: pathlib.Path) -> None:
    """Removes checkpoints that were cut off: Reverb leaves them alone, for ever."""
    for path in directory.iterdir():
        if path.is_dir() and not (path / "DONE").exists():
            shutil.rmtree(path)
