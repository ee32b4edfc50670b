"""A Reverb server as its clients see it. Every call has a deadline; one that is not answered is tried again.

Reverb and TensorFlow are imported when the first server or client is made. It talks to Reverb's
own layer below `reverb.Client`, where a sampler can be closed while somebody waits for it, and an item costs half.
What blocks there without a deadline of its own (drawing, setting priorities) runs in a thread that can be left behind.
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

REPLAY, CLAIMS, HIGHEST = "replay", "claims", "highest"  # the tables of a server

_INFO_TIMEOUT = 1  # seconds that one look at the server may take
_RETRY_INTERVAL = 0.1  # seconds between two
_FLUSH_TIMEOUT_MS = 500  # how long is waited for a confirmation before looking around
_MAX_UNCONFIRMED = 32  # items on their way at once; from 50 on, Reverb warns
_JOIN_TIMEOUT = 10.0  # seconds; a sampler that is closed lets its thread go at once


@functools.cache
def import_reverb() -> tuple[Any, Any]:
    """Return the modules (reverb, tensorflow)."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with extras.explain_import_error("ReverbReplayBuffer", "reverb"):
        import reverb
        import tensorflow
    return reverb, tensorflow


class ReverbConnection:
    """A server's address, and calls to it. Any thread may use it.

    Args:
        address: "host:port".
        timeout: seconds after which a server that does not answer is an error; a restart takes about ten.
    """

    def __init__(self, address: str, timeout: float) -> None:
        self.address, self.timeout = address, timeout
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._client: Any = None

    @property
    def client(self) -> Any:
        """Reverb's own client, made at the first call: a constructor must not wait for TensorFlow."""
        with self._lock:
            if self._client is None:
                self._client = import_reverb()[0].pybind.Client(self.address)
            return self._client

    def info(self, call: str, stop: threading.Event | None = None) -> dict[str, Any]:
        """Return what the server says of each table, a `TableInfo` message.

        Raises:
            PeerError: it did not answer within the timeout.
            StoppedError: `stop` was set while it did not.
        """
        began = time.monotonic()
        while True:
            answer = self.try_info()
            if answer is not None:
                return answer
            if stop is not None and stop.is_set():
                raise StoppedError(f"Told to stop while {call} waited for the Reverb server at {self.address}.")
            self._wait_before_retry(call, began)

    def try_info(self) -> dict[str, Any] | None:
        """Like `info`, but ask once, and return None if there is no answer within a second."""
        client = self.client
        from reverb.cc import schema_pb2

        try:
            answers = client.ServerInfo(_INFO_TIMEOUT)
        except RuntimeError:
            return None
        infos = (schema_pb2.TableInfo.FromString(answer) for answer in answers)
        return {info.name: info for info in infos}

    def signature(self, table: str) -> Any:
        """Return the only `TensorSpec` of a table's signature, or None if there is no such table."""
        answers = self.info("server_info")
        if table not in answers:
            return None
        info = import_reverb()[0].reverb_types.TableInfo.from_serialized_proto(answers[table].SerializeToString())
        return next(iter(info.signature.values())) if info.signature else None

    def draw(self, table: str, count: int, seconds: float) -> list[list[np.ndarray]]:
        """Draw up to `count` items: as many as come within `seconds`.

        Returns:
            For each [key uint64, probability, size of the table, priority, *columns].
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
            sampler.Close()  # ends the waiting of a thread that is left behind
        return list(drawn)

    def sampler(self, table: str, ahead: int) -> Any:
        """Return a Reverb sampler without end that draws up to `ahead` items before they are asked for."""
        self.info("sample")  # it would wait without a deadline for a server that is not there
        return self.client.NewSampler(table, -1, ahead)

    def samplers(self, table: str, ahead: int, count: int) -> SamplerPool:
        """Return `count` such samplers as one; see `SamplerPool`. What one alone draws ahead stays with it."""
        return SamplerPool([self.sampler(table, ahead) for _ in range(count)], ahead if count > 1 else 1)

    def set_priorities(self, table: str, priorities: dict[int, float]) -> None:
        """Set the priorities of items by their keys; those that are gone are ignored."""
        self.call("update_priorities", lambda: self.client.MutatePriorities(table, list(priorities.items()), []))

    def checkpoint(self) -> str:
        """Make the server write a checkpoint. Return its path on the server's machine."""
        return self.call("checkpoint", lambda: self.client.Checkpoint())

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Run a call within a deadline, which Reverb's lack; repeat it while the server cannot be reached."""
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
        """Return whether an error of Reverb's came of a server that has gone; it may be back already."""
        lost = ("Deadline Exceeded", "failed to connect", "failing", "closed", "reset")
        return any(text in str(error) for text in lost) or self.try_info() is None

    def no_answer_error(self, call: str, waited: float) -> PeerError:
        """Return the error for a server that did not answer `call` for `waited` seconds."""
        return PeerError(
            f"The Reverb server at {self.address} did not answer {call} for {waited:.0f} s. "
            "Look at that node's output: it may have failed, hang, or listen at another address."
        )

    def _run_within(self, seconds: float, function: Callable[[], Any]) -> bool:
        """Run `function` in a thread for up to `seconds`, or until the buffer is closed.

        Returns True if it ended. Raises its exceptions.
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
        """Pause before the next attempt. Raise if the time is up."""
        waited = time.monotonic() - began
        if waited >= self.timeout:
            raise self.no_answer_error(call, waited)
        if self.closed.wait(_RETRY_INTERVAL):
            raise ReplayClosedError(f"The replay buffer was closed while {call} waited for {self.address}.")


class ReverbInserter:
    """Puts items of one array each into a table, and returns once the server has them.

    Args:
        connection: the server.
        table: the table's name.
        patience: seconds after which a server that answers, but holds the items back, is an error.
    """

    def __init__(self, connection: ReverbConnection, table: str, patience: float) -> None:
        self._connection, self._table, self._patience = connection, table, patience
        pybind = import_reverb()[0].pybind
        self._writer = connection.client.NewTrajectoryWriter(pybind.ConstantChunkerOptions(1, 1), None)
        # A writer that is dropped unclosed waits in its destructor, without end, for a server that is gone.
        self.close = weakref.finalize(self, self._writer.Close)

    def insert(self, arrays: Any, priority: float = 1.0, stop: threading.Event | None = None) -> None:
        """Insert items.

        Args:
            arrays: of the shape and dtype of the table's signature.
            priority: of all of them.
            stop: ends the waiting. Unconfirmed items are still sent, until this is closed.

        Raises:
            StoppedError: `stop` was set.
            PeerError: the server did not take them in time.
            ReplayClosedError: the buffer was closed meanwhile.
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
                raise StoppedError(f"Told to stop when add had waited {now - began:.1f} s for the server at {address}.")
            if self._connection.try_info() is None:
                if now - reached >= self._connection.timeout:
                    raise self._connection.no_answer_error("add", now - reached)
                continue
            reached = now
            if now - began >= self._patience:
                raise PeerError(
                    f"The Reverb server at {self._connection.address} has held add back for {now - began:.0f} s: its "
                    f"table {self._table!r} is full, or was sampled less than samples_per_insert says. Is its learner "
                    "running? A thread that both adds and samples needs a larger capacity or run_ahead."
                )

    def _confirmed(self, left: int) -> bool:
        try:
            self._writer.Flush(left, _FLUSH_TIMEOUT_MS)
        except RuntimeError as error:
            if "Timeout exceeded" not in str(error):
                raise PeerError(
                    f"The Reverb server at {self._connection.address} refused what was added to its table "
                    f"{self._table!r}: {error}."
                ) from error
            return False
        return True


class SamplerPool:
    """Draws with several of Reverb's samplers at once, each drained by a thread: one alone waits for its round trips.

    No draw lies with a thread or a sampler while others are waited for, so a rate limiter that lets through just enough
    for a batch is enough. Draws of several come in no order, so a queue has one sampler.

    Args:
        samplers: of one table, without end.
        ahead: draws that may wait here.
    """

    def __init__(self, samplers: list[Any], ahead: int) -> None:
        self._samplers, self._ahead = samplers, ahead
        self._drawn: collections.deque[list[np.ndarray]] = collections.deque()
        self._wanted = ahead  # draws that the reader waits for, or where the threads stop while it does not
        self._changed = threading.Condition()
        self._failure: RuntimeError | None = None
        self._threads = [
            threading.Thread(target=self._drain, args=(sampler,), name="rlframe reverb sampler", daemon=True)
            for sampler in samplers
        ]
        for thread in self._threads:
            thread.start()

    def draw(self, least: int, most: int, seconds: float) -> list[list[np.ndarray]]:
        """Wait up to `seconds` for `least` draws, and give those that are there, up to `most`.

        Each is [key uint64, probability, size of the table, priority, *columns].

        Raises:
            RuntimeError: as Reverb's sampler does, also when it was closed.
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
        """End a `draw` that waits, and the threads: none is inside of a sampler afterwards. Any thread may call it."""
        with self._changed:
            self._failure = self._failure or RuntimeError("The samplers were closed.")
            self._changed.notify_all()
        for sampler in self._samplers:
            sampler.Close()
        # A process that ends while a thread is inside of a sampler is aborted by it.
        for thread in self._threads:
            thread.join(timeout=_JOIN_TIMEOUT)

    def _drain(self, sampler: Any) -> None:
        drawn, draw = self._drawn, sampler.GetNextTrajectory  # raises when the sampler is closed
        try:
            while True:
                drawn.append(draw())
                if len(drawn) >= self._wanted:
                    with self._changed:
                        self._changed.notify_all()
                        while len(drawn) >= max(self._ahead, self._wanted) and self._failure is None:
                            self._changed.wait()
        except RuntimeError as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
