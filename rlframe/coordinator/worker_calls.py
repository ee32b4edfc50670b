"""The coordinator's calls to workers. Each call waits for its reply in a separate thread."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.messages import Failed, WorkerKey, WorkerReply
from rlframe.errors import UnavailableError
from rlframe.transport import Client, Transport

_MAX_CALLS = 1000  # maximum number of concurrent calls; each ends within `CALL_TIMEOUT`


class WorkerCalls:
    """The connections to workers, keyed by (worker_id, incarnation), and the calls to workers. Not thread-safe.

    Args:
        transport: The workers' transport.
        put_event: Function that receives `Replied` and `Unanswered`. Other threads call it.
    """

    def __init__(self, transport: Transport, put_event: Callable[[ev.Event], None]) -> None:
        self._transport, self._put_event = transport, put_event
        self._clients: dict[WorkerKey, Client] = {}
        self._delayed: list[tuple[float, int, ev.Send]] = []
        self._order = itertools.count()
        self._threads = ThreadPoolExecutor(_MAX_CALLS, "rlframe worker call")

    def connect(self, key: WorkerKey, address: str) -> None:
        """Connect to a worker."""
        self._clients[key] = self._transport.connect(address)

    def disconnect(self, key: WorkerKey) -> None:
        """Drop a connection."""
        self._clients.pop(key, None)

    def close(self) -> None:
        """Drop all connections, and the calls that have not started."""
        self._clients.clear()
        self._delayed.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def send(self, effect: ev.Send) -> None:
        """Call a worker, now or after `effect.delay`."""
        if effect.delay > 0:
            heapq.heappush(self._delayed, (time.monotonic() + effect.delay, next(self._order), effect))
        else:
            self._call(effect)

    def send_due(self) -> float:
        """Make the delayed calls that are due. Return the seconds until the next delayed call."""
        now = time.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            self._call(heapq.heappop(self._delayed)[2])
        return max(self._delayed[0][0] - now, 0.0) if self._delayed else float("inf")

    def _call(self, effect: ev.Send) -> None:
        client = self._clients.get(effect.key)
        if client is None:
            self._put_event(ev.Unanswered(effect.key, effect.method, effect.header))
        else:
            self._threads.submit(self._call_and_report, client, effect)

    def _call_and_report(self, client: Client, effect: ev.Send) -> None:
        call = (effect.key, effect.method, effect.header)
        args = effect.args if effect.header is None else (effect.header, *effect.args)
        try:
            self._put_event(ev.Replied(*call, call_worker(client, effect.method, *args)))
        except UnavailableError:
            self._put_event(ev.Unanswered(*call))


def call_worker(client: Client, method: str, *args: Any) -> WorkerReply:
    """Call a worker and return its reply. Return `Failed` for an exception, which is a bug of the worker.

    Raises:
        UnavailableError: No reply arrived.
    """
    try:
        reply = client.call(method, *args)
    except UnavailableError:
        raise
    except Exception as error:
        return Failed(type(error).__name__, f"{method} raised: {error}")
    if not isinstance(reply, WorkerReply):
        return Failed("TypeError", f"{method} must return a WorkerReply, got {type(reply).__name__}")
    return reply
