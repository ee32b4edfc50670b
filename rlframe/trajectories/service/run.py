"""One run of the service: its queue, and who waits for it. The id of a group is the position of its payload."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from rlframe.trajectories.queue.queue import Queue


class Applied(NamedTuple):
    """What a command led to.

    Attributes:
        answer: of the queue; an exception where the command could not be.
        freed: positions of payloads that nobody needs any more, but for who takes this very batch.
    """

    answer: Any
    freed: list[int]


class Run:
    def __init__(self) -> None:
        self.queue = Queue()
        self._waiters: set[asyncio.Future[None]] = set()

    def apply(self, position: int, command: str, arguments: Mapping[str, Any]) -> Applied:
        """Applies the command at a position of the log."""
        adds = command == "add"
        if adds:
            arguments = {**arguments, "group_id": position}
        try:
            answer = self.queue.apply(command, arguments)
        except Exception as error:  # the same in every process, and whenever the log is read again
            return Applied(error, [position] if adds else [])
        not_kept = [position] if adds and (answer.group_id is None) else []
        return Applied(answer, not_kept + self.queue.forgotten)

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
