"""Call workers by the operator's transport, now or after a while. No call waits."""

from __future__ import annotations

import concurrent.futures
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Any

from rlframe.coordinator.core import events as ev
from rlframe.coordinator.messages import Failed, WorkerKey, WorkerReply
from rlframe.errors import UnavailableError
from rlframe.transport import Client, Future, Transport


class WorkerCalls:
    """Calls workers, each by its (worker_id, incarnation). Used by one thread.

    Args:
        transport: of the workers.
        happened: is called with `Replied` and `Unanswered`, perhaps by another thread.
    """

    def __init__(self, transport: Transport, happened: Callable[[Any], None]) -> None:
        self._transport, self._happened = transport, happened
        self._clients: dict[WorkerKey, Client] = {}
        self._put_off: list[tuple[float, int, ev.Send]] = []
        self._order = itertools.count()

    def open(self, key: WorkerKey, address: str) -> None:
        """Connect to a worker."""
        self._clients[key] = self._transport.connect(address)

    def shut(self, key: WorkerKey) -> None:
        """Drop a connection."""
        self._clients.pop(key, None)

    def close(self) -> None:
        """Drop all connections and postponed calls."""
        self._clients.clear()
        self._put_off.clear()

    def send(self, effect: ev.Send) -> None:
        """Call a worker, now or after `effect.delay`."""
        if effect.delay > 0:
            heapq.heappush(self._put_off, (time.monotonic() + effect.delay, next(self._order), effect))
        else:
            self._call(effect)

    def send_due(self) -> float:
        """Make the postponed calls that are due; return the seconds until the next one."""
        now = time.monotonic()
        while self._put_off and self._put_off[0][0] <= now:
            self._call(heapq.heappop(self._put_off)[2])
        return max(self._put_off[0][0] - now, 0.0) if self._put_off else float("inf")

    def _call(self, effect: ev.Send) -> None:
        who = (*effect.key, effect.method, effect.header)
        args = effect.args if effect.header is None else (effect.header, *effect.args)

        def done(future: Future) -> None:
            try:
                self._happened(ev.Replied(*who, reply_of(future, effect.method)))
            except (UnavailableError, concurrent.futures.CancelledError) as error:
                self._happened(ev.Unanswered(*who, str(error)))

        client = self._clients.get(effect.key)
        try:
            if client is None:
                raise UnavailableError("there is no connection")
            client.submit(effect.method, *args).add_done_callback(done)
        except Exception as error:  # the other side is gone
            self._happened(ev.Unanswered(*who, str(error)))


def reply_of(future: Future, method: str) -> WorkerReply:
    """Return the reply of a worker. Workers answer errors with `Failed`; an exception here is a bug of the worker.

    Raises:
        UnavailableError: there is no answer.
        CancelledError: the same.
    """
    try:
        reply = future.result()
    except (UnavailableError, concurrent.futures.CancelledError):
        raise
    except Exception as error:
        return Failed(type(error).__name__, f"{method} raised: {error}")
    if not isinstance(reply, WorkerReply):
        return Failed("TypeError", f"{method} must give a WorkerReply, it gave {type(reply).__name__}")
    return reply
