"""The collecting of one group, as whatever runs on its behalf sees it: whether to go on, and who answered."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import time
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class Gate:
    """Open or closed. What runs behind a closed one goes on until it asks a model, and waits there."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._closed_at = 0.0
        self._closed_seconds = 0.0

    @property
    def closed(self) -> bool:
        return not self._opened.is_set()

    @property
    def closed_seconds(self) -> float:
        """All the time that it was closed."""
        return self._closed_seconds + (time.monotonic() - self._closed_at if self.closed else 0.0)

    def set(self, closed: bool) -> None:
        if closed and not self.closed:
            self._closed_at = time.monotonic()
            self._opened.clear()
        elif not closed and self.closed:
            self._closed_seconds = self.closed_seconds
            self._opened.set()

    async def passed(self) -> None:
        """Returns while it is open."""
        await self._opened.wait()


@dataclasses.dataclass(eq=False)
class Work:
    """One attempt to collect a group for an item."""

    item: Any
    gate: Gate
    attempt: int = 1
    started: float = dataclasses.field(default_factory=time.monotonic)
    policy_version: int | None = None  # the oldest that answered
    task: asyncio.Task[Any] | None = None

    def __post_init__(self) -> None:
        self._closed_before = self.gate.closed_seconds

    @property
    def seconds(self) -> float:
        """Since it started, without pauses."""
        return time.monotonic() - self.started - (self.gate.closed_seconds - self._closed_before)

    def answered(self, policy_version: int | None) -> None:
        """A model answered for it, with this version of its parameters."""
        if policy_version is not None:
            known = self.policy_version
            self.policy_version = policy_version if known is None else min(known, policy_version)


# Set in the task that collects a group, and so in every task that this one starts. Nowhere else: an evaluation has
# none, and passes closed gates.
current: contextvars.ContextVar[Work | None] = contextvars.ContextVar("rlframe_work", default=None)


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results, side by side. Where one raises, the others end first: nothing goes on unseen."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
