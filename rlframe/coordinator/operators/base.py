"""The protocol of an operator: what a coordinator asks of where its workers come from."""

from __future__ import annotations

from typing import Protocol

from rlframe.coordinator.messages import WorkerInfo
from rlframe.errors import RlframeError
from rlframe.transport import Transport


class OperatorError(RlframeError):
    """Where workers come from cannot be reached. What runs goes on; the call is repeated."""


class Operator(Protocol):
    """Starts, lists and stops workers. Which ones, and when, `rlframe.coordinator.operator_thread` decides.

    It is called by one thread at a time. Each method may raise `OperatorError`, and is called again then; none takes
    longer than a few seconds. What is asked for may be asked for again, and changes nothing then.

    Attributes:
        transport: by which its workers are called.
        every: seconds between two lists where nothing else happens.
        grace: seconds that a worker is given to end by itself.
    """

    transport: Transport
    every: float
    grace: float

    def list(self) -> list[WorkerInfo]:
        """List all workers that exist now, whoever started them, and those that have ended but still need clearing."""

    def start(self, worker: WorkerInfo) -> None:
        """Starts a worker. Raises UsageError where it has none of that role."""

    def stop(self, worker: WorkerInfo, kill: bool) -> None:
        """Tells a worker to end, or kills it; or clears away what is left of it. Repeated while it is listed."""

    def close(self) -> None:
        """Lets go of what it holds in this process. Ends no worker; may be repeated."""
