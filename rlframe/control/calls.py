"""Call a coordinator from an event loop, in threads and with deadlines, and read its event log."""

from __future__ import annotations

import asyncio
import bisect
import concurrent.futures
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from rlframe.errors import PeerError, RlframeError, UnavailableError
from rlframe.http.bodies import event_data

STATUS_MAX_AGE = 0.2  # maximum age of a cached status, in seconds
STATUS_DEADLINE = 3.0  # seconds for a call of `status`
DEADLINE = 10.0  # seconds for any other call
MAX_CALLS = 32  # maximum number of concurrent calls
KEPT = 10_000  # number of events to keep for slow streams; a coordinator keeps fewer
FIRST = 300  # number of past events at the start of a stream if its reader does not name a first event
HEARTBEAT = 5.0  # seconds without an event after which a stream sends a comment line to keep the connection open
_POLL = 1.0  # seconds that one call of `events` waits for a new event
_EVENTS_DEADLINE = 8.0  # seconds for a call of `events`: longer than one attempt of a remote call
_RETRY_AFTER = 0.5  # seconds before the next call if the coordinator is unreachable or replied at once without events


class CoordinatorCalls:
    """Calls the methods of a coordinator from an event loop.

    Args:
        target: An object with the coordinator's methods, which may block. A call that never returns occupies a daemon
            thread until the process exits.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._free = threading.Semaphore(MAX_CALLS)
        self._status: asyncio.Task[dict[str, Any]] | None = None
        self._status_at = 0.0

    async def __call__(self, method: str, *args: Any, deadline: float = DEADLINE) -> Any:
        """Call `target.method(*args)` in a thread.

        Raises:
            PeerError: The call did not end within `deadline` seconds. It may still succeed later.
            UnavailableError: Too many calls are in progress, so this call was not made. Also raised if the target
                raised an error that is not an `RlframeError`.
        """
        if not self._free.acquire(blocking=False):
            raise UnavailableError(
                f"{MAX_CALLS} calls already wait for the coordinator: it is slow or cannot be reached. Try again."
            )
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # if the awaiting task is cancelled, the call in the thread continues

        def call() -> None:
            try:
                future.set_result(getattr(self._target, method)(*args))
            except Exception as error:
                future.set_exception(error)
            finally:
                self._free.release()

        threading.Thread(target=call, name=f"control {method}", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), deadline)
        except asyncio.TimeoutError:
            raise PeerError(
                f"The coordinator did not answer {method}() within {deadline:g} s: it may be restarting or hanging. "
                "Try again."
            ) from None
        except RlframeError:
            raise
        except Exception as error:
            raise UnavailableError(f"The coordinator failed in {method}(): {type(error).__name__}: {error}") from error

    async def status(self) -> dict[str, Any]:
        """Return the coordinator's status, at most `STATUS_MAX_AGE` seconds old. Concurrent readers share one call."""
        task = self._status
        if task is None or (task.done() and time.monotonic() - self._status_at > STATUS_MAX_AGE):
            task = self._status = asyncio.create_task(self._fetch_status())
        return await asyncio.shield(task)

    def forget_status(self) -> None:
        """Drop the cached status, so that the next reader sees the latest change."""
        self._status = None

    async def _fetch_status(self) -> dict[str, Any]:
        try:
            return await self("status", deadline=STATUS_DEADLINE)
        finally:
            self._status_at = time.monotonic()


class EventLog:
    """The newest events of a coordinator, oldest first, and the event streams that send them."""

    def __init__(self, calls: CoordinatorCalls) -> None:
        self._calls = calls
        self._events: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._changed = asyncio.Event()
        self._has_followed = asyncio.Event()  # set after the first reply of the coordinator
        self._closing = False

    async def follow(self) -> None:
        """Read new events from the coordinator until cancelled."""
        while True:
            asked = time.monotonic()
            try:
                events = await self._calls("events", self.newest, _POLL, deadline=_EVENTS_DEADLINE)
            except RlframeError:
                await asyncio.sleep(_RETRY_AFTER)
                continue
            self._take(events)
            if not events and time.monotonic() - asked < _RETRY_AFTER:
                await asyncio.sleep(_RETRY_AFTER)

    def close(self) -> None:
        """End every stream."""
        self._closing = True
        self._wake()

    @property
    def newest(self) -> int:
        """Number of the last event; 0 before the first event."""
        return self._events[-1]["number"] if self._events else 0

    async def stream(self, since: int | None) -> AsyncIterator[bytes]:
        """Return a stream of server-sent events after number `since`; None means the last `FIRST` events.

        Raises:
            PeerError: The coordinator has not sent any events so far. Raised before the stream starts.
        """
        try:
            await asyncio.wait_for(self._has_followed.wait(), _EVENTS_DEADLINE)
        except asyncio.TimeoutError:
            raise PeerError("The coordinator has not sent its events: it may be restarting. Try again.") from None
        known = since if since is not None else self._events[-FIRST]["number"] - 1 if len(self._events) > FIRST else 0
        return self._stream(known)

    async def _stream(self, known: int) -> AsyncIterator[bytes]:
        yield b"retry: 1000\n\n"
        while not self._closing:
            changed = self._changed
            start = bisect.bisect_right(self._events, known, key=lambda event: event["number"])
            if start < len(self._events):
                news = list(itertools.islice(self._events, start, None))
                known = news[-1]["number"]
                yield b"".join(map(_encode, news))
                continue
            try:
                await asyncio.wait_for(changed.wait(), HEARTBEAT)
            except asyncio.TimeoutError:
                yield b": here\n\n"

    def _take(self, events: list[dict[str, Any]]) -> None:
        self._has_followed.set()
        for event in events:
            if event["number"] > self.newest:
                self._events.append(event)
        if events:
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _encode(event: dict[str, Any]) -> bytes:
    return b"id: %d\ndata: %s\n\n" % (event["number"], event_data(event))
