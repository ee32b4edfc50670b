"""Workers as processes beside Ray actors, as the nodes of a program under the engine `ray` are.

They are started, and their lines shown, by the process that has the program's connection to Ray
(`rlframe.engines.launching.ray_workers`): the launcher of `rlframe train`. A coordinator asks it, and needs no Ray.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from rlframe.coordinator.messages import WorkerInfo
from rlframe.coordinator.operators.base import OperatorError
from rlframe.coordinator.workers.process import CLOSING
from rlframe.errors import PeerError, StoppedError, UsageError
from rlframe.transport import Transport
from rlframe.transport.ray import RayTransport


class RayOperator:
    """Has workers started and ended on a Ray cluster. See `Operator`.

    They outlive the coordinator, whose successor finds them, and end with the process that started them.

    Args:
        workers: `rlframe.engines.launching.ray_workers.RayWorkers`, or the handle to it.
    """

    transport: Transport = RayTransport()
    every = 0.2
    grace = CLOSING + 2.0

    def __init__(self, workers: Any) -> None:
        self._workers = workers

    def list(self) -> list[WorkerInfo]:
        """See `Operator`."""
        with _reaching_launcher():
            seen = self._workers.list()
        return [
            WorkerInfo(
                each.role,
                each.index,
                each.incarnation,
                each.address,
                each.host,
                each.pid,
                has_ended=each.has_ended,
                problem=each.problem,
            )
            for each in seen
        ]

    def start(self, worker: WorkerInfo) -> None:
        """See `Operator`."""
        with _reaching_launcher():
            roles = self._workers.roles()
            if worker.role not in roles:
                raise UsageError(f"There are no workers of the role {worker.role!r}, only {', '.join(roles)}.")
            self._workers.start(worker.role, worker.index, worker.incarnation)

    def stop(self, worker: WorkerInfo, kill: bool) -> None:
        """See `Operator`."""
        with _reaching_launcher():
            self._workers.stop(worker.role, worker.index, worker.incarnation, kill)

    def close(self) -> None:
        """See `Operator`."""


@contextlib.contextmanager
def _reaching_launcher() -> Iterator[None]:
    try:
        yield
    except (PeerError, StoppedError) as error:
        raise OperatorError(f"The process that starts the workers on Ray does not answer: {error}") from error
