"""Commands that were submitted and are not applied yet: what they are, and who waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from rlframe.trajectories.service.run import Applied


class Command(NamedTuple):
    run: str
    name: str
    arguments: Mapping[str, Any]
    size: int  # bytes of its record
    payload: bytes | None
    answer: asyncio.Future[Applied]


class Pending:
    """The commands of one process, by number.

    Attributes:
        bytes: of their payloads.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.next_number = 0
        self._commands: dict[int, Command] = {}

    def __bool__(self) -> bool:
        return bool(self._commands)

    def add(self, command: Command) -> None:
        """It gets `next_number`."""
        self._commands[self.next_number] = command
        self.next_number += 1
        self.bytes += len(command.payload or b"")

    def get(self, number: int | None) -> Command | None:
        return None if number is None else self._commands.get(number)

    def settle(self, number: int) -> Command | None:
        """Nothing is pending any more under this number. Returns what was, if it is waited for."""
        command = self._commands.pop(number, None)
        if command is None:
            return None
        self.bytes -= len(command.payload or b"")
        return None if command.answer.done() else command

    def fail(self, number: int, error: BaseException) -> None:
        if (command := self.settle(number)) is not None:
            command.answer.set_exception(error)

    def fail_all(self, error: BaseException) -> None:
        for number in list(self._commands):
            self.fail(number, error)

    async def wait(self, timeout: float) -> None:
        """Until all that is pending now has been answered."""
        if answers := [command.answer for command in self._commands.values()]:
            await asyncio.wait(answers, timeout=timeout)
