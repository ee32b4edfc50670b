"""Operators start a coordinator's workers: as processes of this machine (`local.py`), or on Ray (`ray.py`).

This file has the protocol, `Operator`. `supervised.py` has all but where a worker runs:

    operator.scale("collector", 2)      # `SupervisedOperator` makes two slots of its `Supervisor` (rlframe/engines)
                                        # and starts a node in each: collector/0 and collector/1
    operator.list_workers()             # a `WorkerInfo` of each: its address, incarnation 0, problems
    # collector/1 is killed             # after the pause of `Backoff` incarnation 1 of collector/1 is started
    operator.replace(("collector/0", 0))    # the coordinator lost it: it is killed, and incarnation 1 is started
    operator.scale("collector", 1)
    operator.release(("collector/1", 1))    # it ends for good
"""

from __future__ import annotations

from typing import Protocol

from rlframe.coordinator.messages import Role, WorkerInfo, WorkerKey
from rlframe.errors import RlframeError
from rlframe.transport import Transport


class OperatorError(RlframeError):
    """The operator cannot be reached. The workers continue; the call is repeated."""


class Operator(Protocol):
    """Keeps workers running: it starts them, and starts those that die again, with the next incarnation.

    `rlframe.coordinator.operator_thread` calls it. Each method may raise `OperatorError`, or `PeerError` if it calls
    another process; it is called again then. No call takes longer than a few seconds. Repeated calls change nothing.

    Attributes:
        transport: by which its workers are called.
        every: seconds between two lists.
        grace: seconds that a worker is given to end by itself.
    """

    transport: Transport
    every: float
    grace: float

    def list_workers(self) -> list[WorkerInfo]:
        """List all workers: those that run, and those that died and are about to be started again."""

    def scale(self, role: Role, n: int) -> None:
        """Keep `n` workers of this role running. Where more run, none ends: see `release`.

        Raises:
            UsageError: it has no workers of this role.
        """

    def replace(self, key: WorkerKey) -> None:
        """Kill this incarnation, and start the next one."""

    def release(self, key: WorkerKey) -> None:
        """End this incarnation for good: it has `grace` seconds to end by itself.

        If fewer run than are wanted then, others are started: `scale` down first.
        """

    def close(self) -> None:
        """Free its resources in this process, and end the workers that belong to this process. May be repeated."""
