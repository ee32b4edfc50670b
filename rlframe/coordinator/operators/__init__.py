"""Operators, which start a coordinator's workers.

This file defines the protocol `Operator`. `supervised.py` implements it for processes of this machine and for Ray:

    operator.scale("collector", 2)          # `SupervisedOperator` adds two slots to its `Supervisor` (rlframe/engines),
                                            # and starts a node in each: collector/0 and collector/1
    operator.list_workers()                 # returns a `WorkerInfo` for each: address, incarnation 0, problem
    # collector/1 is killed                 # incarnation 1 of collector/1 starts after the backoff
    operator.replace(("collector/0", 0))    # kills incarnation 0 of collector/0, and starts incarnation 1
    operator.scale("collector", 1)
    operator.release(("collector/1", 1))    # ends collector/1 without a replacement
"""

from __future__ import annotations

from typing import Protocol

from rlframe.coordinator.messages import Role, WorkerInfo, WorkerKey
from rlframe.errors import RlframeError
from rlframe.transport import Transport


class OperatorError(RlframeError):
    """The operator cannot be reached. The workers continue, and the coordinator repeats the call."""


class Operator(Protocol):
    """A service that keeps workers running: if a worker dies, it starts the next incarnation.

    `rlframe.coordinator.threads` calls the methods. Each method can raise `OperatorError`, or `PeerError` if
    it calls another process. The caller then retries. Each call ends within a few seconds. Repeated calls change
    nothing.

    Attributes:
        transport: The workers' transport.
        every: Seconds between two calls of `list_workers`.
        grace: Seconds for a released worker to end before it is killed.
    """

    transport: Transport
    every: float
    grace: float

    def list_workers(self) -> list[WorkerInfo]:
        """Return all workers that run, and the dead workers whose next incarnation will start soon."""

    def scale(self, role: Role, n: int) -> None:
        """Keep `n` workers of this role running. Additional workers continue until `release` is called for them.

        Raises:
            UsageError: The operator cannot start workers of this role.
        """

    def replace(self, key: WorkerKey) -> None:
        """Kill this incarnation of a worker, and start its next incarnation."""

    def release(self, key: WorkerKey) -> None:
        """End this incarnation of a worker. It has `grace` seconds to end before it is killed.

        If fewer workers than requested remain, the operator starts new workers.
        To prevent this, call `scale` with the smaller number first.
        """

    def close(self) -> None:
        """Free the operator's resources in this process, and end the workers that this process supervises.

        Repeated calls change nothing.
        """
