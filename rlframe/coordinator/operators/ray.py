"""Workers beside Ray actors, as the nodes of a program under the engine `ray` are."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import TextIO

from rlframe.coordinator.messages import Role
from rlframe.coordinator.operators.supervised import MakeNode, SupervisedOperator
from rlframe.engines.logs import NodeLogs
from rlframe.transport.ray import RayTransport, current_sockets

_ADDRESS = "operator"  # on the Ray node of the process that makes it


class RayOperator(SupervisedOperator):
    """Runs workers on a Ray cluster. See `Operator`. Make it in the process that is connected to Ray.

    Args:
        nodes: see `RayEngine.worker_nodes`.
        output: where the workers' lines go; stderr.
        logs: the directory in which they are kept as well; None: nowhere.
        hang_timeout: see `Supervisor`.
    """

    def __init__(
        self,
        nodes: Mapping[Role, MakeNode],
        *,
        output: TextIO | None = None,
        logs: pathlib.Path | None = None,
        hang_timeout: float = 0.0,
    ) -> None:
        self._remove = current_sockets().open(current_sockets().socket(_ADDRESS))  # even if this process is killed
        super().__init__(nodes, RayTransport(), _ADDRESS, logs=NodeLogs(logs, output), hang_timeout=hang_timeout)

    def close(self) -> None:
        """See `Operator`."""
        if not self._is_closed:
            super().close()
            self._remove()
