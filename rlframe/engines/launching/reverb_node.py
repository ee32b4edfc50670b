"""A Reverb server as a node that saves itself, and goes on from what it saved when it is started again.

Launchpad's own `ReverbNode` saves nothing unless a client asks it to.
"""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any

import launchpad as lp
import reverb
from launchpad import address as lp_address

from rlframe.interprocess.progress import SAVING

_SHARE = 0.05  # of the time may go into checkpoints: inserts and samples wait meanwhile

_log = logging.getLogger(__name__)


class CheckpointedReverbNode(lp.ReverbNode):
    """`lp.ReverbNode` with checkpoints: a server that dies loses what came in the last `seconds`, or little more.

    Args:
        tables: makes the tables, as `ReverbReplayBuffer.tables(agent)` does.
        directory: where the newest checkpoint is, on the machine of the node. A server that starts reads it.
        seconds: between two checkpoints; longer where one takes more than a twentieth of that.
        at_end: seconds that one may take when the program stops.
    """

    def __init__(
        self,
        tables: Callable[[], list[Any]],
        directory: str | os.PathLike,
        seconds: float = 30.0,
        at_end: float = 4.0,
    ) -> None:
        path = pathlib.Path(directory).absolute()
        super().__init__(tables, functools.partial(reverb.checkpointers.DefaultCheckpointer, str(path)))
        self._directory, self._seconds, self._at_end = path, seconds, at_end

    def run(self) -> None:
        """Serves, and saves, until the program ends."""
        self._directory.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self._directory)
        port = lp_address.get_port_from_address(self._address.resolve())
        server = reverb.Server(self._priority_tables_fn(), port, self._checkpoint_ctor())
        client, stop = server.localhost_client(), lp.stop_event()
        took = 0.0
        while not stop.wait(max(self._seconds, took / _SHARE)):
            took = save(client, self._directory)
        if took < self._at_end:
            save(client, self._directory)


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
