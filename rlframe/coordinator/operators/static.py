"""Workers that somebody else starts: the operator is told where they are."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlframe.coordinator.messages import Alive, Role, WorkerHealth, WorkerInfo, worker_id_of
from rlframe.errors import UsageError
from rlframe.handles import Poll, Remote
from rlframe.transport import DEFAULT, Transport

_FORGOTTEN = 5.0  # seconds without an answer after which a worker is taken for dead
_CONNECTING = 1.0  # seconds that the first list waits for all to answer


class StaticOperator:
    """Lists, of the workers at these addresses, those that answer. Starts and ends none. See `Operator`.

    A worker says itself which it is, and of which incarnation: who starts it again gives it a higher one. One that
    was lost is wanted again as its next incarnation only; one that was let go may be wanted again as it is.

    Args:
        addresses: by role, where each worker is called; the first is to be that role's index 0, and so on.
    """

    transport: Transport = DEFAULT
    every, grace, starts = 0.5, 0.0, False

    def __init__(self, addresses: Mapping[Role, Sequence[str]]) -> None:
        self._workers = [
            _Worker(role, index, address, self.transport)
            for role, of_role in addresses.items()
            for index, address in enumerate(of_role)
        ]
        if not self._workers:
            raise UsageError('A static operator needs the address of a worker: {"learner": ["host:port"], ...}.')
        self._has_waited = False

    def list(self) -> list[WorkerInfo]:
        """See `Operator`. The first time it waits, up to a second, for all to answer."""
        until = time.monotonic() + (0.0 if self._has_waited else _CONNECTING)
        self._has_waited = True
        while True:
            infos = [worker.ask() for worker in self._workers]
            if time.monotonic() >= until or all(worker.answered_at for worker in self._workers):
                return infos
            time.sleep(0.02)

    def start(self, worker: WorkerInfo) -> None:
        """See `Operator`: it is never asked to."""

    def stop(self, worker: WorkerInfo, kill: bool) -> None:
        """See `Operator`: it is never asked to."""

    def close(self) -> None:
        """See `Operator`."""


class _Worker:
    """A worker at an address, and when it last said that it is alive."""

    def __init__(self, role: Role, index: int, address: str, transport: Transport) -> None:
        self._role, self._index, self._address = role, index, address
        self._worker_id = worker_id_of(role, index)
        self.answered_at = 0.0
        self._problem = f"{self._worker_id} at {address} has not answered yet."
        self._incarnation = -1
        self._poll = Poll(Remote([address], self._worker_id, transport=transport), "ping")

    def ask(self) -> WorkerInfo:
        """Takes the answer to the ping before, if it has come, and pings again; what is known then."""
        answer: Any = self._poll()
        if isinstance(answer, Alive):
            self.answered_at, self._incarnation = time.monotonic(), answer.incarnation
            expected = answer.worker_id == self._worker_id
            self._problem = "" if expected else f"At {self._address} is {answer.worker_id}, not {self._worker_id}."
        elif self.answered_at and time.monotonic() > self.answered_at + _FORGOTTEN:
            self._problem = f"{self._worker_id} at {self._address} does not answer any more."
        return WorkerInfo(
            self._role,
            self._index,
            self._incarnation,
            self._address,
            host=self._address.rpartition(":")[0],
            stays=True,
            health=WorkerHealth.DEAD if self._problem else WorkerHealth.LIVE,
            problem=self._problem,
        )
