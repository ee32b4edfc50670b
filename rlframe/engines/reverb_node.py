"""A Launchpad node with a Reverb server that saves checkpoints by itself. `lp.ReverbNode` saves only on request."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import launchpad as lp
from launchpad import address as lp_address

from rlframe.engines.reverb_server import ReverbServer


class CheckpointedReverbNode(lp.ReverbNode):
    """`lp.ReverbNode` with checkpoints: see `ReverbServer`.

    Args:
        tables: function that creates the tables, such as `ReverbReplayBuffer.tables(agent)`.
        directory: directory of the newest checkpoint, on the machine of the node.
        seconds, at_end: see `ReverbServer`.
    """

    def __init__(
        self,
        tables: Callable[[], list[Any]],
        directory: str | os.PathLike,
        seconds: float = 30.0,
        at_end: float = 4.0,
    ) -> None:
        super().__init__(tables)
        path = pathlib.Path(directory).absolute()
        self._make = functools.partial(ReverbServer, tables, path, seconds=seconds, at_end=at_end)

    def run(self) -> None:
        """Serve and save periodically until the program ends."""
        self._make(port=lp_address.get_port_from_address(self._address.resolve())).run()
