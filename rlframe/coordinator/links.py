"""How workers are called: by Courier, or directly where they live in this process. No call waits."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from rlframe import handles
from rlframe.coordinator.messages import Failed, Reply

_log = logging.getLogger(__name__)

_THREADS = 16  # that call workers of this process

Answer = Callable[[Reply | None, str], None]  # (the reply, or None and why there is none)

# Links that were shut and have calls out. A Courier client ends its process where the last that holds it is its own
# thread, which brings the answer: so each is held here until that is over.
_ending: list[Any] = []


class Links:
    """Connections to workers, each by (worker_id, incarnation)."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, int], Any] = {}
        self._pool: _Pool | None = None
        self._lock = threading.Lock()

    def open(self, worker_id: str, incarnation: int, address: Any) -> None:
        """Connects to a worker: "host:port", or an object in this process."""
        with self._lock:
            if isinstance(address, str):
                self._links[worker_id, incarnation] = _Remote(address)
                return
            if self._pool is None:
                self._pool = _Pool()
            self._links[worker_id, incarnation] = _Local(address, self._pool)

    def shut(self, worker_id: str, incarnation: int) -> None:
        """Drops a connection. An answer that is still to come is nobody's."""
        link = self._links.pop((worker_id, incarnation), None)
        _ending[:] = [each for each in (*_ending, link) if each is not None and each.calls.out > 0]

    def call(self, worker_id: str, incarnation: int, method: str, args: tuple[Any, ...], answer: Answer) -> None:
        """Calls a worker; `answer` is called by another thread when there is an answer, or none will come."""
        link = self._links.get((worker_id, incarnation))
        if link is None:
            answer(None, "there is no connection")
            return
        calls = link.calls

        def done(future: Any) -> None:  # holds the link's calls, and not the link
            is_open = self._calls((worker_id, incarnation)) is calls
            calls.count(-1)
            if is_open:
                answer(*_outcome(future, method))

        calls.count(+1)
        try:
            link(method, args).add_done_callback(done)
        except Exception as error:  # the other side is gone
            calls.count(-1)
            answer(None, str(error))

    def close(self) -> None:
        """Drops all connections."""
        for key in list(self._links):
            self.shut(*key)
        if self._pool is not None:
            self._pool.close()

    def _calls(self, key: tuple[str, int]) -> _Calls | None:
        link = self._links.get(key)
        return link.calls if link is not None else None


class _Calls:
    """How many of a link's are out."""

    def __init__(self) -> None:
        self.out = 0
        self._lock = threading.Lock()

    def count(self, change: int) -> None:
        with self._lock:
            self.out += change


class _Remote:
    def __init__(self, address: str) -> None:
        self._client, self.calls = handles.connect(address), _Calls()

    def __call__(self, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self._client.futures, method)(*args)


class _Pool:
    """Threads that call workers of this process.

    They are daemons, as those of ThreadPoolExecutor are not: a worker that never answers would keep the program from
    ending.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Any, Callable[[], Any]] | None] = queue.SimpleQueue()
        for _ in range(_THREADS):
            threading.Thread(target=self._run, name="rlframe calls", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        for _ in range(_THREADS):
            self._calls.put(None)

    def _run(self) -> None:
        while (taken := self._calls.get()) is not None:
            future, call = taken
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)


class _Local:
    def __init__(self, worker: Any, pool: _Pool) -> None:
        self._worker, self._pool, self.calls = worker, pool, _Calls()

    def __call__(self, method: str, args: tuple[Any, ...]) -> Any:
        return self._pool.submit(functools.partial(getattr(self._worker, method), *args))


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
