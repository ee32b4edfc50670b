"""The coordinator's events for any number of listeners: one long poll follows it, and all hear of what that gives."""

from __future__ import annotations

import asyncio
import bisect
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from rlframe.coordinator.control.calls import Calls
from rlframe.errors import PeerError, RlframeError

KEPT = 10_000  # events, for streams that are behind
FIRST = 300  # that a stream begins with where it does not say what it knows
HEARTBEAT = 5.0  # seconds without an event after which a stream says that it is there
_POLL = 1.0  # seconds that the coordinator may wait for an event
_DEADLINE = 8.0  # seconds for it to answer: more than one attempt of a remote call
_PAUSE = 0.5  # seconds before it is asked again, where it did not wait or is away


class EventLog:
    """What happened last, oldest first, and who waits for more."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._events: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._numbers: deque[int] = deque(maxlen=KEPT)
        self._changed = asyncio.Event()
        self._followed = asyncio.Event()  # the first answer has come
        self._closing = False

    async def follow(self) -> None:
        """Goes on until it is cancelled."""
        while True:
            asked = time.monotonic()
            try:
                events = await self._calls("events", self.newest, _POLL, deadline=_DEADLINE)
            except RlframeError:
                await asyncio.sleep(_PAUSE)
                continue
            self._take(events)
            if not events and time.monotonic() - asked < _PAUSE:
                await asyncio.sleep(_PAUSE)

    def close(self) -> None:
        """Ends every stream."""
        self._closing = True
        self._wake()

    @property
    def newest(self) -> int:
        """The number of the last event; 0 before any."""
        return self._numbers[-1] if self._numbers else 0

    async def stream(self, since: int | None) -> AsyncIterator[bytes]:
        """Server-sent events from after the number `since` on; None: from the last few on.

        Raises:
            PeerError: no event could be had yet (before anything is sent).
        """
        try:
            await asyncio.wait_for(self._followed.wait(), _DEADLINE)
        except asyncio.TimeoutError:
            raise PeerError("The coordinator has not told its events: it may be restarting. Ask again.") from None
        known = since if since is not None else self._numbers[-FIRST] - 1 if len(self._numbers) > FIRST else 0
        older: list[dict[str, Any]] = []
        if self._numbers and known + 1 < self._numbers[0]:
            older = [one for one in await self._calls("events", known, 0.0) if one["number"] < self._numbers[0]]
        return self._stream(known, older)

    async def _stream(self, known: int, older: list[dict[str, Any]]) -> AsyncIterator[bytes]:
        yield b"retry: 1000\n\n" + b"".join(map(_encode, older))
        while not self._closing:
            changed = self._changed
            start = bisect.bisect_right(self._numbers, known)
            if start < len(self._events):
                news = [self._events[i] for i in range(start, len(self._events))]
                known = news[-1]["number"]
                yield b"".join(map(_encode, news))
                continue
            try:
                await asyncio.wait_for(changed.wait(), HEARTBEAT)
            except asyncio.TimeoutError:
                yield b": here\n\n"

    def _take(self, events: list[dict[str, Any]]) -> None:
        self._followed.set()
        for event in events:
            if event["number"] > self.newest:
                self._events.append(event)
                self._numbers.append(event["number"])
        if events:
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _encode(event: dict[str, Any]) -> bytes:
    return b"id: %d\ndata: %s\n\n" % (event["number"], msgspec.json.encode(event))
