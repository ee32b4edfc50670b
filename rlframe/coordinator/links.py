"""How workers are called: by Courier, or directly where they live in this process. No call waits."""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

from rlframe import handles
from rlframe.coordinator.messages import Failed, Reply

_log = logging.getLogger(__name__)

_THREADS = 16  # that call workers of this process

Answer = Callable[[Reply | None, str], None]  # (the reply, or None and why there is none)


class Links:
    """Connections to workers, each by (worker_id, incarnation).

    A Courier client must not go in a thread that brings an answer: it would wait for that thread itself, and the
    process would abort. So what an answer calls holds the number of a connection, never the connection.
    """

    def __init__(self) -> None:
        self._links: dict[tuple[str, int], Any] = {}
        self._numbers: dict[tuple[str, int], int] = {}  # of those that are open
        self._count = itertools.count()
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def open(self, worker_id: str, incarnation: int, address: Any) -> None:
        """Connects to a worker: "host:port", or an object in this process."""
        with self._lock:
            self._numbers[worker_id, incarnation] = next(self._count)
            if isinstance(address, str):
                self._links[worker_id, incarnation] = _Remote(address)
                return
            if self._pool is None:
                self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "rlframe calls")
            self._links[worker_id, incarnation] = _Local(address, self._pool)

    def shut(self, worker_id: str, incarnation: int) -> None:
        """Drops a connection. An answer that is still to come is nobody's."""
        self._numbers.pop((worker_id, incarnation), None)
        self._links.pop((worker_id, incarnation), None)

    def call(self, worker_id: str, incarnation: int, method: str, args: tuple[Any, ...], answer: Answer) -> None:
        """Calls a worker; `answer` is called by another thread when there is an answer, or none will come."""
        link, number = self._links.get((worker_id, incarnation)), self._numbers.get((worker_id, incarnation))
        if link is None:
            answer(None, "there is no connection")
            return

        def done(future: Any) -> None:
            if self._numbers.get((worker_id, incarnation)) == number:
                answer(*_outcome(future, method))

        try:
            link(method, args).add_done_callback(done)
        except Exception as error:  # the other side is gone
            answer(None, str(error))

    def close(self) -> None:
        """Drops all connections."""
        self._numbers.clear()
        self._links.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


class _Remote:
    def __init__(self, address: str) -> None:
        self._client = handles.connect(address)

    def __call__(self, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self._client.futures, method)(*args)


class _Local:
    def __init__(self, worker: Any, pool: concurrent.futures.ThreadPoolExecutor) -> None:
        self._worker, self._pool = worker, pool

    def __call__(self, method: str, args: tuple[Any, ...]) -> Any:
        return self._pool.submit(getattr(self._worker, method), *args)


def _outcome(future: Any, method: str) -> tuple[Reply | None, str]:
    try:
        reply = future.result()
    except concurrent.futures.CancelledError:
        return None, "the call was cancelled"
    except Exception as error:
        # What a worker raises comes as a reply: this is of the way to it, or a bug of its own.
        if getattr(getattr(error, "code", None), "name", None) in handles.NOT_ANSWERED or isinstance(error, OSError):
            return None, str(error)
        return Failed(type(error).__name__, f"{method} raised: {error}"), ""
    if not isinstance(reply, Reply):
        return Failed("TypeError", f"{method} must give a Reply, it gave {type(reply).__name__}"), ""
    return reply, ""
