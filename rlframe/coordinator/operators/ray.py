"""The operator for Ray. It runs workers next to Ray actors, in the same way as the engine `ray` runs nodes."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import TextIO

from rlframe.coordinator.messages import Role
from rlframe.coordinator.operators.supervised import MakeNode, SupervisedOperator
from rlframe.engines.logs import NodeLogs
from rlframe.transport.ray import RayTransport, current_sockets

_ADDRESS = "operator"  # address of the operator, on the Ray node where it is created


class RayOperator(SupervisedOperator):
    """An operator that runs workers on a Ray cluster. See `Operator`. Its process must be connected to Ray.

    Args:
        nodes: See `RayEngine.worker_nodes`.
        output: Stream for the workers' output. The default is stderr.
        logs: Directory for a copy of the output. None writes no copy.
        hang_timeout: See `Supervisor`.
    """

    def __init__(
        self,
        nodes: Mapping[Role, MakeNode],
        *,
        output: TextIO | None = None,
        logs: pathlib.Path | None = None,
        hang_timeout: float = 0.0,
    ) -> None:
        self._remove = current_sockets().open(current_sockets().socket(_ADDRESS))  # also removed after SIGKILL
        super().__init__(nodes, RayTransport(), _ADDRESS, logs=NodeLogs(logs, output), hang_timeout=hang_timeout)

    def close(self) -> None:
        """See `Operator`."""
        if not self._is_closed:
            super().close()
            self._remove()
