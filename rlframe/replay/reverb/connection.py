"""Connections of clients to a Reverb server. Every call has a deadline. A call that gets no answer is retried.

Reverb and TensorFlow are imported when the first server or client is created. This module uses Reverb's internal layer
below `reverb.Client` for two reasons. It takes half the time for each item, and one thread can close a sampler while
another thread waits for it. In this layer, draws and updates of priorities have no deadline. So they run in a separate
thread, which is abandoned after the deadline.
"""

from __future__ import annotations

import collections
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from rlframe import extras
from rlframe.errors import PeerError, StoppedError
from rlframe.replay.base import ReplayClosedError

REPLAY, CLAIMS, HIGHEST = "replay", "claims", "highest"  # names of the server's tables

_INFO_TIMEOUT = 1  # seconds
_RETRY_INTERVAL = 0.1  # seconds between two attempts
_FLUSH_TIMEOUT_MS = 500  # milliseconds between two checks for errors, while waiting for confirmations
_MAX_UNCONFIRMED = 32  # maximum number of unconfirmed items; Reverb prints a warning above 50
_JOIN_TIMEOUT = 10.0  # maximum seconds until the thread of a closed sampler ends


@functools.cache
def import_reverb() -> tuple[Any, Any]:
    """Import and return the modules (reverb, tensorflow)."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with extras.explain_import_error("ReverbReplayBuffer", "reverb"):
        import reverb
        import tensorflow
    return reverb, tensorflow


class ReverbConnection:
    """The address of a server, with methods that call the server. Any thread can use the connection.

    Args:
        address: "host:port".
        timeout: seconds to wait for a server that does not answer. A restart takes about ten seconds.
    """

    def __init__(self, address: str, timeout: float) -> None:
        self.address, self.timeout = address, timeout
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._client: Any = None

    @property
    def client(self) -> Any:
        """Reverb's client. It is created at the first call, because importing TensorFlow is slow."""
        with self._lock:
            if self._client is None:
                self._client = import_reverb()[0].pybind.Client(self.address)
            return self._client

    def info(self, call: str, stop: threading.Event | None = None) -> dict[str, Any]:
        """Return the server's `TableInfo` message of each table.

        Raises:
            PeerError: the server did not answer within the timeout.
            StoppedError: `stop` was set before the server answered.
        """
        began = time.monotonic()
        while True:
            answer = self.try_info()
            if answer is not None:
                return answer
            if stop is not None and stop.is_set():
                raise StoppedError(f"{call} was stopped while it waited for the Reverb server at {self.address}.")
            self._wait_before_retry(call, began)

    def try_info(self) -> dict[str, Any] | None:
        """Call `info` without retries, and return its result. Return None if there is no answer within a second."""
        client = self.client
        from reverb.cc import schema_pb2

        try:
            answers = client.ServerInfo(_INFO_TIMEOUT)
        except RuntimeError:
            return None
        infos = (schema_pb2.TableInfo.FromString(answer) for answer in answers)
        return {info.name: info for info in infos}

    def signature(self, table: str) -> Any:
        """Return the only `TensorSpec` of a table's signature. None if there is no such table."""
        answers = self.info("server_info")
        if table not in answers:
            return None
        info = import_reverb()[0].reverb_types.TableInfo.from_serialized_proto(answers[table].SerializeToString())
        return next(iter(info.signature.values())) if info.signature else None

    def draw(self, table: str, count: int, seconds: float) -> list[list[np.ndarray]]:
        """Draw up to `count` items. Return the items that arrive within `seconds`.

        Returns:
            One list [key (uint64), probability, size of the table, priority, *columns] for each item.
        """
        drawn: list[list[np.ndarray]] = []
        samplers: list[Any] = []

        def run() -> None:
            samplers.append(self.client.NewSampler(table, count, count))
            for _ in range(count):
                drawn.append(samplers[0].GetNextTrajectory())

        try:
            self._run_within(seconds, run)
        except RuntimeError as error:
            if not self.is_connection_error(error):
                raise
        for sampler in samplers:
            sampler.Close()  # this also ends an abandoned thread
        return list(drawn)

    def sampler(self, table: str, ahead: int) -> Any:
        """Return an endless Reverb sampler that draws up to `ahead` items ahead of time."""
        self.info("sample")  # raise if the server is unreachable, because a sampler would wait forever
        return self.client.NewSampler(table, -1, ahead)

    def samplers(self, table: str, ahead: int, count: int) -> SamplerPool:
        """Return a `SamplerPool` of `count` samplers.

        If `count` is 1, the sampler stores the items that are drawn ahead of time. Otherwise the pool stores them.
        """
        return SamplerPool([self.sampler(table, ahead) for _ in range(count)], ahead if count > 1 else 1)

    def set_priorities(self, table: str, priorities: dict[int, float]) -> None:
        """Set the priorities of items by their server keys. Evicted items are ignored."""
        self.call("update_priorities", lambda: self.client.MutatePriorities(table, list(priorities.items()), []))

    def checkpoint(self) -> str:
        """Make the server write a checkpoint. Return its path on the server's machine."""
        return self.call("checkpoint", lambda: self.client.Checkpoint())

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Run a call of Reverb with a deadline. Retry while the server is unreachable."""
        began, result = time.monotonic(), []
        while True:
            self.info(name)
            try:
                if self._run_within(self.timeout, lambda: result.append(function())):
                    return result[0]
            except RuntimeError as error:
                if not self.is_connection_error(error):
                    raise
            self._wait_before_retry(name, began)

    def is_connection_error(self, error: RuntimeError) -> bool:
        """Return True if an error of Reverb means that the server was unreachable at the time of the call."""
        lost = ("Deadline Exceeded", "failed to connect", "failing", "closed", "reset")
        return any(text in str(error) for text in lost) or self.try_info() is None

    def no_answer_error(self, call: str, waited: float) -> PeerError:
        """Return a PeerError: the server did not answer `call` for `waited` seconds."""
        return PeerError(
            f"The Reverb server at {self.address} did not answer {call} for {waited:.0f} s. "
            "Check the output of that node: it may have failed, hang, or listen at another address."
        )

    def _run_within(self, seconds: float, function: Callable[[], Any]) -> bool:
        """Run `function` in a thread, and wait up to `seconds` or until the buffer is closed. Raise its exception.

        Returns:
            True if the function returned in time.
        """
        raised: list[BaseException] = []

        def run() -> None:
            try:
                function()
            except BaseException as error:
                raised.append(error)

        thread, end = threading.Thread(target=run, name="rlframe reverb call", daemon=True), time.monotonic() + seconds
        thread.start()
        while thread.is_alive() and (left := end - time.monotonic()) > 0 and not self.closed.is_set():
            thread.join(min(left, _RETRY_INTERVAL))
        if raised:
            raise raised[0]
        return not thread.is_alive()

    def _wait_before_retry(self, call: str, began: float) -> None:
        """Wait before the next attempt. Raise an error after the timeout."""
        waited = time.monotonic() - began
        if waited >= self.timeout:
            raise self.no_answer_error(call, waited)
        if self.closed.wait(_RETRY_INTERVAL):
            raise ReplayClosedError(f"The replay buffer was closed while {call} waited for {self.address}.")


class ReverbInserter:
    """Inserts items into a table. Each item is one array. `insert` returns when the server has confirmed the items.

    Args:
        connection: the connection to the server.
        table: the name of the table.
        patience: seconds to wait if the server answers, but does not accept the items.
    """

    def __init__(self, connection: ReverbConnection, table: str, patience: float) -> None:
        self._connection, self._table, self._patience = connection, table, patience
        pybind = import_reverb()[0].pybind
        self._writer = connection.client.NewTrajectoryWriter(pybind.ConstantChunkerOptions(1, 1), None)
        # Close the writer explicitly, because its destructor waits forever if the server is unreachable.
        self.close = weakref.finalize(self, self._writer.Close)

    def insert(self, arrays: Any, priority: float = 1.0, stop: threading.Event | None = None) -> None:
        """Insert items.

        Args:
            arrays: the items, as arrays with the shape and dtype of the table's signature.
            priority: the priority of all items.
            stop: an event that ends the wait. Items that are not confirmed are sent until this inserter is closed.

        Raises:
            StoppedError: `stop` was set.
            PeerError: the server did not accept the items in time.
            ReplayClosedError: the buffer was closed during the call.
        """
        for i, array in enumerate(arrays):
            self._writer.CreateItem(self._table, priority, [self._writer.Append([array])], [True])
            if i % _MAX_UNCONFIRMED == _MAX_UNCONFIRMED - 1:
                self._flush(_MAX_UNCONFIRMED // 2, stop)
        self._flush(0, stop)

    def _flush(self, left: int, stop: threading.Event | None) -> None:
        began = reached = time.monotonic()
        while not self._confirmed(left):
            now = time.monotonic()
            if self._connection.closed.is_set():
                raise ReplayClosedError(f"The replay buffer was closed while add waited {now - began:.1f} s.")
            if stop is not None and stop.is_set():
                address = self._connection.address
                raise StoppedError(
                    f"add was stopped after it had waited {now - began:.1f} s for the server at {address}."
                )
            if self._connection.try_info() is None:
                if now - reached >= self._connection.timeout:
                    raise self._connection.no_answer_error("add", now - reached)
                continue
            reached = now
            if now - began >= self._patience:
                raise PeerError(
                    f"The Reverb server at {self._connection.address} has blocked add for {now - began:.0f} s: its "
                    f"table {self._table!r} is full, or was sampled less than samples_per_insert requires. Is its "
                    "learner running? A thread that both adds and samples needs a larger capacity or run_ahead."
                )

    def _confirmed(self, left: int) -> bool:
        try:
            self._writer.Flush(left, _FLUSH_TIMEOUT_MS)
        except RuntimeError as error:
            if "Timeout exceeded" not in str(error):
                raise PeerError(
                    f"The Reverb server at {self._connection.address} refused an item for its table "
                    f"{self._table!r}: {error}."
                ) from error
            return False
        return True


class SamplerPool:
    """Draws with several samplers of Reverb in parallel, because each sampler waits for network round trips.

    There is one thread for each sampler.

    A waiting reader gets each draw immediately, so the pool works even if the rate limiter allows only one batch. The
    draws of several samplers have no order, so a queue uses one sampler.

    Args:
        samplers: endless samplers of one table.
        ahead: maximum number of draws to store in the pool.
    """

    def __init__(self, samplers: list[Any], ahead: int) -> None:
        self._samplers, self._ahead = samplers, ahead
        self._drawn: collections.deque[list[np.ndarray]] = collections.deque()
        self._wanted = ahead  # number of stored draws at which a thread wakes the reader
        self._changed = threading.Condition()
        self._failure: RuntimeError | None = None
        self._threads = [
            threading.Thread(target=self._drain, args=(sampler,), name="rlframe reverb sampler", daemon=True)
            for sampler in samplers
        ]
        for thread in self._threads:
            thread.start()

    def draw(self, least: int, most: int, seconds: float) -> list[list[np.ndarray]]:
        """Wait up to `seconds` until there are `least` draws. Return the available draws, but at most `most`.

        A draw is [key uint64, probability, size of the table, priority, *columns].

        Raises:
            RuntimeError: Reverb's sampler failed or was closed.
        """
        with self._changed:
            self._wanted = least
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._drawn) >= least or self._failure is not None, seconds)
            self._wanted = self._ahead
            if not self._drawn and self._failure is not None:
                raise self._failure
            drawn = [self._drawn.popleft() for _ in range(min(most, len(self._drawn)))]
            self._changed.notify_all()
            return drawn

    def Close(self) -> None:
        """End a waiting `draw` and all threads, so that no thread is inside a sampler. Any thread can call this."""
        with self._changed:
            self._failure = self._failure or RuntimeError("The samplers were closed.")
            self._changed.notify_all()
        for sampler in self._samplers:
            sampler.Close()
        # Wait, because a sampler aborts a process that exits while a thread is inside the sampler.
        for thread in self._threads:
            thread.join(timeout=_JOIN_TIMEOUT)

    def _drain(self, sampler: Any) -> None:
        drawn, draw = self._drawn, sampler.GetNextTrajectory  # GetNextTrajectory raises if the sampler is closed
        try:
            while True:
                drawn.append(draw())
                if len(drawn) >= self._wanted:
                    with self._changed:
                        self._changed.notify_all()
                        self._changed.wait_for(
                            lambda: len(drawn) < max(self._ahead, self._wanted) or self._failure is not None
                        )
        except RuntimeError as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
