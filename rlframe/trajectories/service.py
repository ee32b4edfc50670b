"""The replicated state machine: every change is a command in the store's log, applied in the order of the log.

All service processes of one store hold the same queues, and after a restart the log leads to the same state. A command
is applied, and answered, once it is durable. Everything here but what names a thread runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from rlframe.errors import PeerError, RlframeError, StoreError, UnavailableError, UsageError
from rlframe.trajectories import snapshots
from rlframe.trajectories.latest import Latest
from rlframe.trajectories.leases import Batch
from rlframe.trajectories.queue import Queue
from rlframe.trajectories.run import Applied, Run
from rlframe.trajectories.stores import RecordsDroppedError, Store

MAX_RUNS = 1000
SNAPSHOT_RECORDS = 20_000  # after so many the next restart reads a snapshot: about a second of replaying
_AT_ONCE = 64  # commands that are applied before the event loop does something else
_TICK = 0.5  # seconds between looks at the clock, for leases and silent environments
_NEARLY = 0.8  # of the bytes that may be kept
_RETRY = 0.5  # seconds until a store that did not answer is read again
_GRACE = 60.0  # seconds for another process to read what it has just taken, before what nobody needs is swept
_TIMED = frozenset(("register", "reset", "register_env", "heartbeat", "add", "take", "renew", "expire"))  # take `now`

_logger = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str, str, dict[str, Any], str, int]).decode


class FullError(UnavailableError):
    """The service keeps as many bytes as it may."""


class _Pending(NamedTuple):
    run: str
    command: str
    arguments: Mapping[str, Any]
    payload: bytes | None
    answer: asyncio.Future[Applied]


class Service:
    """All runs of one store.

    Args:
        store: it is closed by `close`.
        max_bytes: of groups that are kept.
        snapshot_records: a snapshot is taken after so many commands, or later where it would be costly.
    """

    def __init__(self, store: Store, *, max_bytes: int, snapshot_records: int = SNAPSHOT_RECORDS) -> None:
        self.store = store
        self._latest = Latest()
        self.stored_bytes = 0  # of all groups whose payloads are needed
        self.pending_bytes = 0  # of those that are being written
        self.turn = asyncio.Lock()  # of whoever decodes a group, which takes milliseconds
        self.failed: StoreError | None = None  # what the store takes nothing more for
        self.on_failure: Callable[[], None] = lambda: None
        self._runs: dict[str, Run] = {}
        self._position = 0  # up to which the log is applied
        self.max_bytes = max_bytes
        self._snapshot_records = snapshot_records
        self._snapshot_position = 0
        self._origin = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._durable: deque[tuple[concurrent.futures.Future[int], int]] = deque()
        self._draining = False
        self._closing = False
        self._background: set[asyncio.Task[None]] = set()
        self._threads: list[threading.Thread] = []
        self._left: list[int] = []  # payloads that nobody needed when this process started

    # Life

    def restore(self) -> None:
        """Brings back what the store holds, before `start`. Raises `StoreError` or `PeerError` where that cannot be."""
        while True:
            if (snapshot := self.store.load()) is not None:
                self._set_state(*snapshot)
            try:
                while records := self.store.read(self._position):
                    for position, record in records:
                        run, command, arguments, _, _ = _decode(record)
                        self._note(run, command, position, self._change(position, run, command, arguments))
                break
            except RecordsDroppedError:  # another process took a snapshot meanwhile
                continue
        needed = {position for run in self._runs.values() for position in run.queue.held()}
        self._left = [at for at in self.store.held() if at <= self._position and at not in needed]

    async def start(self) -> None:
        """Begins to take commands."""
        self._loop = asyncio.get_running_loop()
        self._later(self._tick())
        if self.store.shared:
            self._threads = [threading.Thread(target=self._follow, name="follower of the log", daemon=True)]
            self._threads[0].start()
        # What a crash left behind; another process may just be reading what it took.
        self._loop.call_later(_GRACE if self.store.shared else 0.0, self._forget, self._left)

    def stop_waiting(self) -> None:
        """Nobody waits for data any more: the service is about to end."""
        self._closing = True
        for run in self._runs.values():
            run.wake()

    @property
    def closing(self) -> bool:
        return self._closing

    async def close(self) -> None:
        """Writes what was submitted, and a snapshot, and closes the store."""
        self.stop_waiting()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        answers = [pending.answer for pending in self._pending.values()]
        if answers:
            await asyncio.wait(answers, timeout=10.0)
        for thread in self._threads:
            await self._loop.run_in_executor(None, thread.join, 10.0)
        if self.failed is None and self._position > self._snapshot_position:
            await self._snapshot()
        await self._loop.run_in_executor(None, self.store.close)

    # Commands

    async def submit(self, run: str, command: str, payload: bytes | None = None, **arguments: Any) -> Any:
        """Logs a command of `Queue` and returns its answer, once it is durable and applied.

        Args:
            run: it begins with its first command.
            payload: of an `add`.
            arguments: without `now`.

        Raises:
            UsageError: the command cannot be; there are too many runs.
            UnavailableError: the store takes nothing now; nothing was kept.
            PeerError: the store did not answer: whether the command took effect will show.
            StoreError: the store failed.
        """
        applied = await self._submit(run, command, arguments, payload)
        return applied.answer

    async def take(self, run: str, **arguments: Any) -> tuple[Batch, list[bytes]] | None:
        """A batch and its payloads, or None. As `submit`; a payload that is lost is an `UnavailableError`."""
        applied = await self._submit(run, "take", arguments, None)
        batch = applied.answer
        payloads: list[bytes | None] = []
        if batch is not None:
            payloads = await self._loop.run_in_executor(None, self.store.payloads, batch.group_ids)
        self._forget(applied.freed)
        if batch is None:
            return None
        found = [payload for payload in payloads if payload is not None]
        if len(found) == len(payloads):
            return batch, found
        # Damaged, or a new epoch began meanwhile. A lease would bring it back again and again.
        if batch.lease_until is not None:
            await self.submit(run, "ack", batch_id=batch.batch_id)
        raise UnavailableError(f"Batch {batch.batch_id} of run {run!r} can no longer be read from the store.")

    def submit_later(self, run: str, command: str, **arguments: Any) -> None:
        """As `submit`, where nobody waits for the answer."""
        self._later(self._quietly(run, command, arguments))

    async def _quietly(self, run: str, command: str, arguments: Mapping[str, Any]) -> None:
        try:
            await self._submit(run, command, arguments, None)
        except RlframeError as error:
            _logger.warning("%s in run %r: %s", command, run, error)

    async def _submit(self, run: str, command: str, arguments: Mapping[str, Any], payload: bytes | None) -> Applied:
        if self.failed is not None:
            raise self.failed
        if run not in self._runs and len(self._runs) >= MAX_RUNS:
            raise UnavailableError(f"There are {MAX_RUNS} runs already. Use one of them, or another store.")
        if command in _TIMED:
            arguments = {**arguments, "now": time.time()}
        number = next(self._numbers)
        record = _encode((run, command, arguments, self._origin, number))
        pending = _Pending(run, command, arguments, payload, self._loop.create_future())
        self._pending[number] = pending
        self.pending_bytes += len(payload or b"")
        try:
            future = self.store.append(record, payload)
        except BaseException:
            self._settle(number)
            raise
        future.add_done_callback(functools.partial(self._on_durable, number))
        applied = await pending.answer
        if isinstance(applied.answer, Exception):
            raise applied.answer
        return applied

    def _settle(self, number: int) -> _Pending | None:
        """Nothing is pending any more under this number. Returns what was, if it is waited for."""
        pending = self._pending.pop(number, None)
        if pending is None:
            return None
        self.pending_bytes -= len(pending.payload or b"")
        return None if pending.answer.done() else pending

    def check_room(self, size: int) -> None:
        """Raises `FullError` where so many bytes more are too much."""
        if self.stored_bytes + self.pending_bytes + size > self.max_bytes:
            raise FullError(
                f"The service keeps {self.stored_bytes >> 20} MB, its limit. Trainers have to take some first."
            )

    @property
    def nearly_full(self) -> bool:
        """Environments should hold."""
        return self.stored_bytes + self.pending_bytes > _NEARLY * self.max_bytes

    # Reads

    def queue(self, run: str) -> Queue:
        """The queue of a run, to be read; an empty one where there is no such run."""
        known = self._runs.get(run)
        return Queue() if known is None else known.queue

    @property
    def runs(self) -> list[str]:
        return sorted(self._runs)

    async def changed(self, run: str, timeout: float) -> None:
        """Returns when a command was applied in this run, after `timeout` seconds, or when the service ends."""
        known = self._runs.get(run)
        if known is None or self._closing:
            return
        waiter = known.changed()
        try:
            await asyncio.wait([waiter], timeout=timeout)
        finally:
            known.forget_waiter(waiter)

    async def latest_groups(self, run: str, count: int) -> list[bytes]:
        """The payloads of the latest groups, newest first, as far as they are still known."""
        missing = self._latest.missing(run, count)
        found = await self._loop.run_in_executor(None, self.store.payloads, missing) if missing else []
        return self._latest.payloads(run, count, dict(zip(missing, found)))

    # Applying, in the order of the log

    def _on_durable(self, number: int, future: concurrent.futures.Future[int]) -> None:
        """On the store's thread, in the order of positions."""
        self._durable.append((future, number))
        if not self._draining:
            self._draining = True
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._draining = False  # first: what comes from here on schedules another
        for _ in range(_AT_ONCE):
            if not self._durable:
                return
            future, number = self._durable.popleft()
            error = future.exception()
            if error is not None:
                self._fail(number, error)
            elif not self.store.shared:
                pending = self._pending[number]
                self._apply(future.result(), pending.run, pending.command, pending.arguments, number)
        self._draining = True
        self._loop.call_soon(self._drain)

    def _fail(self, number: int, error: BaseException) -> None:
        if isinstance(error, StoreError):
            self._lost(error)
        if (pending := self._settle(number)) is not None:
            pending.answer.set_exception(error)

    def _apply(self, position: int, run: str, command: str, arguments: Mapping[str, Any], number: int | None) -> None:
        """Applies one record; `number` where this process submitted it."""
        applied = self._change(position, run, command, arguments)
        pending = None
        if number is not None:
            payload = self._pending[number].payload if number in self._pending else None
            pending = self._settle(number)
        else:
            payload = None
        if pending is not None:
            pending.answer.set_result(applied)
        if number is not None and not (pending is not None and command == "take"):
            self._forget(applied.freed)
        self._note(run, command, position, applied, payload)
        self._runs[run].wake()
        if position - self._snapshot_position >= self._snapshot_records and not self._closing:
            self._snapshot_position = position
            self._later(self._snapshot())

    def _note(self, run: str, command: str, position: int, applied: Applied, payload: bytes | None = None) -> None:
        """Remembers a group that was added, for people who look."""
        if command == "add" and applied.freed[:1] != [position]:
            self._latest.add(run, position, payload)

    def _change(self, position: int, run: str, command: str, arguments: Mapping[str, Any]) -> Applied:
        state = self._runs.setdefault(run, Run())
        before = state.queue.stored_bytes
        applied = state.apply(position, command, arguments)
        if isinstance(applied.answer, Exception) and not isinstance(applied.answer, UsageError):
            _logger.error("%s in run %r failed at position %d: %r", command, run, position, applied.answer)
        self.stored_bytes += state.queue.stored_bytes - before
        self._position = position
        return applied

    def _forget(self, positions: list[int]) -> None:
        if positions:
            with contextlib.suppress(RlframeError):  # the next start sweeps what is left
                self.store.forget(positions)

    # State

    async def _snapshot(self) -> None:
        """Keeps the state as it is now, so that the next start need not read the log before it."""
        position = self._snapshot_position = self._position
        state = {name: run.get_state() for name, run in self._runs.items()}
        encoded = await self._loop.run_in_executor(None, snapshots.encode, state)
        try:
            await asyncio.wrap_future(self.store.snapshot(position, encoded))
        except RlframeError as error:
            _logger.warning("No snapshot was taken: %s", error)

    def _set_state(self, position: int, encoded: bytes) -> None:
        self._runs = {name: Run.from_state(state) for name, state in snapshots.decode(encoded).items()}
        self.stored_bytes = sum(run.queue.stored_bytes for run in self._runs.values())
        self._position = self._snapshot_position = position

    # What goes on beside

    def _later(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _tick(self) -> None:
        while not self._closing:
            await asyncio.sleep(_TICK)
            now = time.time()
            for name, run in list(self._runs.items()):
                if run.queue.due(now) and self.failed is None:
                    await self._quietly(name, "expire", {})

    def _follow(self) -> None:
        """A thread: hands over what any process has appended."""
        after = self._position
        while not self._closing or self._pending:
            try:
                if not self.store.wait(after, 0.2 if self._closing else 1.0):
                    continue
                records = self.store.read(after)
            except RecordsDroppedError:
                self._reload()
                after = self._position
                continue
            except StoreError as error:
                self._hand_over(functools.partial(self._lost, error))
                self._hand_over(functools.partial(self._fail_all, error))
                return
            except RlframeError as error:
                if not self._closing:
                    _logger.warning("%s", error)
                time.sleep(_RETRY)
                continue
            self._hand_over(functools.partial(self._apply_records, records))
            after = records[-1][0]

    def _hand_over(self, work: Any) -> None:
        """Runs `work` on the event loop's thread and waits for it."""
        done = threading.Event()

        def run() -> None:
            try:
                work()
            finally:
                done.set()

        self._loop.call_soon_threadsafe(run)
        while not done.wait(1.0):
            if self._loop.is_closed():
                return

    def _apply_records(self, records: list[tuple[int, bytes]]) -> None:
        for position, record in records:
            run, command, arguments, origin, number = _decode(record)
            self._apply(position, run, command, arguments, number if origin == self._origin else None)

    def _reload(self) -> None:
        """On the follower's thread: goes on from a snapshot that another process has taken."""
        snapshot = self.store.load()
        if snapshot is None:
            raise StoreError("The store dropped records without a snapshot.")

        def replace() -> None:
            runs = self._runs
            self._set_state(*snapshot)
            self._fail_all(PeerError("This process was too far behind the others to tell what became of the request."))
            for run in runs.values():
                run.wake()

        self._hand_over(replace)

    def _fail_all(self, error: RlframeError) -> None:
        for number in list(self._pending):
            self._fail(number, error)

    def _lost(self, error: StoreError) -> None:
        """The store takes nothing more."""
        if self.failed is None:
            self.failed = error
            self.on_failure()
