"""One run of the service: its queue, and where in the store the payloads of its groups lie."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from rlframe.trajectories.leases import Batch
from rlframe.trajectories.queue import Queue


class Applied(NamedTuple):
    """What a command led to.

    Attributes:
        answer: of the queue; an exception where the command could not be.
        served: positions of the payloads of the batch that was taken.
        freed: positions of payloads that nobody needs any more, but for who takes this very batch.
    """

    answer: Any
    served: list[int]
    freed: list[int]


class Run:
    def __init__(self) -> None:
        self.queue = Queue()
        self._positions: dict[int, int] = {}  # group id -> position of the record that added it
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def positions(self) -> Mapping[int, int]:
        """Group id -> position in the log, of every group whose payload is needed."""
        return self._positions

    def apply(self, position: int, command: str, arguments: Mapping[str, Any]) -> Applied:
        """Applies the command at a position of the log."""
        served: list[int] = []
        freed: list[int] = []
        try:
            answer = self.queue.apply(command, arguments)
        except Exception as error:  # the same in every process, and whenever the log is read again
            return Applied(error, served, [position] if command == "add" else [])
        if command == "add":
            if answer.group_id is None or answer.duplicate:
                freed.append(position)
            else:
                self._positions[answer.group_id] = position
        if isinstance(answer, Batch):
            served += [self._positions[group_id] for group_id in answer.group_ids]
        forgotten = self.queue.forgotten
        gone = forgotten.ids
        if forgotten.before:
            gone = gone + [group_id for group_id in self._positions if group_id < forgotten.before]
        freed += [self._positions.pop(group_id) for group_id in gone]
        return Applied(answer, served, freed)

    def wake(self) -> None:
        """Lets everybody who waits for a change look again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def changed(self) -> asyncio.Future[None]:
        """Done once something has changed; to be given to `forget_waiter` if it is no longer waited for."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        return waiter

    def forget_waiter(self, waiter: asyncio.Future[None]) -> None:
        self._waiters.discard(waiter)

    def get_state(self) -> dict[str, Any]:
        return {"queue": self.queue.get_state(), "positions": [list(self._positions), list(self._positions.values())]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Run:
        run = cls()
        run.queue.set_state(state["queue"])
        run._positions = dict(zip(*state["positions"]))
        return run
