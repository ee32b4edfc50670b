"""The service: every change is a command in the store's log, applied in the order of the log (see `state_machine`).

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
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from rlframe.errors import PeerError, RlframeError, StoreError, UnavailableError
from rlframe.trajectories.queue.leases import LeasedBatch
from rlframe.trajectories.queue.queue import Queue
from rlframe.trajectories.service.state_machine import (
    RUN_CREATING_COMMANDS,
    CommandResult,
    StateMachine,
    decode_command,
    encode_command,
    encode_state,
    read_next,
)
from rlframe.trajectories.stores import SharedStore, Store

MAX_RUNS = 1000
SNAPSHOT_BYTES = 4 << 20  # of commands: about 20,000, and a second of replaying them
ANSWER_DEADLINE = 60.0  # seconds for a command to be durable and applied
_AT_ONCE = 64  # commands that are applied before the event loop does something else
_TICK = 0.5  # seconds between looks at the clock, for leases and silent environments
_WAIT, _WAIT_CLOSING = 1.0, 0.2  # seconds for what others append, until it looks whether the service has ended
_RETRY = 0.5  # seconds until a store that did not answer is read again
_NEARLY = 0.8  # of the bytes that may be kept
_GRACE = 60.0  # seconds for another process to read what it has just taken, before what nobody needs is swept
_TIMED = frozenset(("register", "reset", "register_env", "heartbeat", "add", "take", "renew", "expire"))  # take `now`

_logger = logging.getLogger(__name__)


class _PendingCommand(NamedTuple):
    """A command that is not applied yet."""

    run: str
    command: str
    arguments: Mapping[str, Any]
    payload: bytes | None
    size: int  # bytes of its record
    answer: asyncio.Future[CommandResult]


class Service:
    """All runs of one store.

    Args:
        store: it is closed by `close`.
        max_bytes: of groups that are kept.
        snapshot_bytes: of commands, or as many as the last snapshot had, after which another is taken.
        answer_deadline: seconds for a command to be durable and applied.

    Attributes:
        decoding: held by whoever decodes a group, which takes milliseconds.
        failed: what the store takes nothing more for.
        on_failure: called when that happens.
        closing: the service is about to end: nobody waits for data any more.
        pending_bytes: of groups that are being written.
    """

    def __init__(
        self,
        store: Store,
        *,
        max_bytes: int,
        snapshot_bytes: int = SNAPSHOT_BYTES,
        answer_deadline: float = ANSWER_DEADLINE,
    ) -> None:
        self.store = store
        self._max_bytes = max_bytes
        self.decoding = asyncio.Lock()
        self.failed: StoreError | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.closing = False
        self.pending_bytes = 0
        self._snapshot_bytes = snapshot_bytes
        self._snapshot_due = snapshot_bytes  # bytes of commands until then
        self._answer_deadline = answer_deadline
        self._machine = StateMachine()
        self._origin = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._submitted: dict[int, _PendingCommand] = {}
        self._durable: deque[tuple[concurrent.futures.Future[int], int]] = deque()
        self._draining = False
        self._changes: dict[str, asyncio.Event] = {}  # of the runs where somebody waits for one
        self._background: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None
        self._left: list[int] = []  # payloads that nobody needed when this process started

    # Life

    def restore(self, fresh: bool = False) -> None:
        """Bring back what the store holds, before `start`; `fresh`: reset every run. Raise as `load` of a store."""
        self._snapshot_due -= self._machine.restore(self.store)
        if fresh:
            self._machine.reset_all_runs(self.store)
        self._left = self._machine.orphaned_payloads(self.store)

    async def start(self) -> None:
        """Begin to take commands."""
        self._loop = asyncio.get_running_loop()
        self._later(self._tick())
        if self.store.shared:
            self._following = self._loop.create_task(self._follow(cast(SharedStore, self.store)))
        # What a crash left behind; another process may just be reading what it took.
        self._loop.call_later(_GRACE if self.store.shared else 0.0, self._forget, self._left)

    def stop_waiting(self) -> None:
        """Answer those who wait for data: the service is about to end."""
        self.closing = True
        self._wake(*self._changes)

    async def close(self) -> None:
        """Write what was submitted, and a snapshot, and close the store."""
        self.stop_waiting()
        for task in self._background:
            task.cancel()
        try:
            await asyncio.gather(*self._background, return_exceptions=True)
            if answers := [submitted.answer for submitted in self._submitted.values()]:
                await asyncio.wait(answers, timeout=10.0)
            if self._following is not None:  # it ends once nothing is pending
                self._fail(PeerError("The service ended before the store told what became of the request."))
                await asyncio.wait([self._following], timeout=10.0)
            if self.failed is None and self._machine.position > self._machine.snapshot_position:
                await self._snapshot()
        finally:
            await asyncio.to_thread(self.store.close)

    # Commands

    async def submit(self, run: str, command: str, payload: bytes | None = None, **arguments: Any) -> Any:
        """Log a command of `Queue` and return its answer, once it is durable and applied.

        Args:
            run: it begins with the first of `RUN_CREATING_COMMANDS`. To the others one that is not there is empty.
            payload: of an `add`.
            arguments: without `now`.

        Raises:
            UsageError: the command cannot be; there are too many runs.
            UnavailableError: the store takes nothing now; nothing was kept.
            PeerError: the store did not answer: whether the command took effect will show.
            StoreError: the store failed.
        """
        return (await self._submit(run, command, arguments, payload)).answer

    async def take(self, run: str, **arguments: Any) -> tuple[LeasedBatch, list[bytes]] | None:
        """A batch and its payloads, or None. As `submit`; a payload that is lost is an `UnavailableError`."""
        applied = await self._submit(run, "take", arguments)
        batch = applied.answer
        if batch is None:
            self._forget(applied.freed)
            return None
        payloads = await asyncio.to_thread(self.store.payloads, batch.group_ids)
        self._forget(applied.freed)
        found = [payload for payload in payloads if payload is not None]
        if len(found) == len(payloads):
            return batch, found
        # Damaged, or a new epoch began meanwhile. A lease would bring it back again and again.
        if batch.lease_until is not None:
            await self.submit(run, "ack", batch_id=batch.batch_id)
        lost = f"of its {len(payloads)} groups {len(payloads) - len(found)} can no longer be read from the store"
        error = f"Batch {batch.batch_id} of run {run!r} is dropped: {lost}. Ask for the next one."
        _logger.error("%s", error)
        raise UnavailableError(error)

    def submit_later(self, run: str, command: str, **arguments: Any) -> None:
        """As `submit`, where nobody waits for the answer."""
        self._later(self._quietly(run, command, arguments))

    async def _quietly(self, run: str, command: str, arguments: Mapping[str, Any]) -> None:
        try:
            await self._submit(run, command, arguments)
        except RlframeError as error:
            _logger.warning("%s in run %r: %s", command, run, error)

    async def _submit(
        self, run: str, command: str, told: Mapping[str, Any], payload: bytes | None = None
    ) -> CommandResult:
        if self.failed is not None:
            raise self.failed
        arguments = {**told, "now": time.time()} if command in _TIMED else told
        queues = self._machine.queues
        if command in RUN_CREATING_COMMANDS and run not in queues and len(queues) >= MAX_RUNS:
            raise UnavailableError(f"There are {MAX_RUNS} runs already. Use one of them, or another store.")
        number = next(self._numbers)
        record = encode_command((run, command, arguments, self._origin, number))
        submitted = _PendingCommand(run, command, arguments, payload, len(record), self._loop.create_future())
        self._submitted[number] = submitted
        self.pending_bytes += len(payload or b"")
        try:
            future = self.store.append(record, payload)
        except BaseException:
            self._settle(number)
            raise
        future.add_done_callback(functools.partial(self._on_durable, number))
        try:
            applied = await asyncio.wait_for(submitted.answer, self._answer_deadline)
        except asyncio.TimeoutError:
            waited = f"The store did not tell within {self._answer_deadline:g} s what became of the request."
            raise PeerError(f"{waited} It may still take effect.") from None
        if isinstance(applied.answer, Exception):
            raise applied.answer
        return applied

    # Reads

    def queue(self, run: str) -> Queue:
        """The queue of a run, to be read; an empty one where there is no such run."""
        return self._machine.queues.get(run) or Queue()

    @property
    def runs(self) -> list[str]:
        return sorted(self._machine.queues)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all groups whose payloads are needed."""
        return self._machine.stored_bytes

    @property
    def byte_limit(self) -> int:
        """Bytes of groups that may be kept: `max_bytes`, or what the store's disk has room for."""
        left = self.store.room()
        return self._max_bytes if left is None else min(self._max_bytes, self.stored_bytes + left)

    @property
    def nearly_full(self) -> bool:
        """Whether environments should hold."""
        return self.stored_bytes + self.pending_bytes >= _NEARLY * self.byte_limit

    def check_room(self, size: int) -> None:
        """Raise `UnavailableError` if there is no room for so many bytes of groups more."""
        if self.stored_bytes + self.pending_bytes + size > self._max_bytes:
            kept = self.stored_bytes >> 20
            raise UnavailableError(f"The service keeps {kept} MB, its limit. Trainers have to take some first.")
        self.store.check_room(self.pending_bytes + size)

    async def changed(self, run: str, timeout: float) -> None:
        """Return when a command was applied in this run, after `timeout` seconds, or when the service ends."""
        if run in self._machine.queues and not self.closing:
            change = self._changes.setdefault(run, asyncio.Event())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(change.wait(), timeout)

    async def latest_groups(self, run: str, count: int) -> list[bytes]:
        """Return the payloads of the latest groups, newest first, as far as they are still known."""
        newest = self._machine.latest.newest(run, count)
        missing = [position for position, payload in newest.items() if payload is None]
        newest |= zip(missing, await asyncio.to_thread(self.store.payloads, missing) if missing else ())
        return [payload for payload in newest.values() if payload is not None]

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
                self._fail(error, number)
            elif not self.store.shared:
                self._apply_submitted(future.result(), number)
        self._draining = True
        self._loop.call_soon(self._drain)

    def _apply_submitted(self, position: int, number: int) -> None:
        """Apply a command that this process submitted, and answer whoever waits for it."""
        run, command, arguments, payload, size, _ = self._submitted[number]
        applied = self._machine.apply(position, run, command, arguments, payload)
        waited_for = self._settle(number)
        if waited_for is not None:
            waited_for.answer.set_result(applied)
        if waited_for is None or command != "take":  # who takes a batch reads it first
            self._forget(applied.freed)
        self._count_applied(run, size)

    def _apply_records(self, records: list[tuple[int, bytes]]) -> None:
        """Apply what any process has submitted, and answer those that were submitted here."""
        for position, record in records:
            run, command, arguments, origin, number = decode_command(record)
            if origin == self._origin and number in self._submitted:
                self._apply_submitted(position, number)
                continue
            applied = self._machine.apply(position, run, command, arguments)
            if origin == self._origin:  # nobody waits for it any more
                self._forget(applied.freed)
            self._count_applied(run, len(record))

    def _count_applied(self, run: str, size: int) -> None:
        """Note that a record of so many bytes changed something in this run."""
        self._wake(run)
        self._snapshot_due -= size
        if self._snapshot_due <= 0 and not self.closing:
            self._snapshot_due = self._snapshot_bytes
            self._later(self._snapshot())

    def _wake(self, *runs: str) -> None:
        """Let everybody who waits for a change look again."""
        for run in runs:
            if change := self._changes.pop(run, None):
                change.set()

    def _settle(self, number: int) -> _PendingCommand | None:
        """Take out what is pending under this number. Return it if somebody waits for it."""
        submitted = self._submitted.pop(number, None)
        if submitted is None:
            return None
        self.pending_bytes -= len(submitted.payload or b"")
        return None if submitted.answer.done() else submitted

    def _fail(self, error: BaseException, *numbers: int) -> None:
        """End what was submitted under these numbers, or all of it, with an error; a `StoreError` ends the service."""
        if isinstance(error, StoreError) and self.failed is None:
            self.failed = error
            self.on_failure()
        for number in numbers or list(self._submitted):
            if (submitted := self._settle(number)) is not None:
                submitted.answer.set_exception(error)

    def _forget(self, positions: list[int]) -> None:
        if positions:
            with contextlib.suppress(RlframeError):  # the next start sweeps what is left
                self.store.forget(positions)

    # What goes on beside

    async def _snapshot(self) -> None:
        """Keep the state as it is now, so that the next start need not read the log before it."""
        position = self._machine.snapshot_position = self._machine.position
        try:
            encoded = await asyncio.to_thread(encode_state, self._machine.get_state())
            self._snapshot_due = max(self._snapshot_bytes, len(encoded))
            await asyncio.wrap_future(self.store.snapshot(position, encoded))
        except RlframeError as error:
            _logger.warning("No snapshot was taken: %s", error)
        except Exception:  # the log has everything
            _logger.exception("No snapshot was taken.")

    async def _tick(self) -> None:
        while not self.closing:
            await asyncio.sleep(_TICK)
            now = time.time()
            for run, queue in list(self._machine.queues.items()):
                if queue.due(now) and self.failed is None:
                    await self._quietly(run, "expire", {})

    def _later(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _follow(self, store: SharedStore) -> None:
        """Apply what any process appends to a store that several share, until this one has nothing more to submit."""
        while not self.closing or self._submitted:
            after, wait = self._machine.position, _WAIT_CLOSING if self.closing else _WAIT
            try:
                if not await asyncio.to_thread(store.wait, after, wait):
                    continue
                snapshot, records = await asyncio.to_thread(read_next, store, after)
            except StoreError as error:
                self._fail(error)
                return
            except RlframeError as error:
                if not self.closing:
                    _logger.warning("%s", error)
                await asyncio.sleep(_RETRY)
                continue
            if snapshot is not None:  # another process has taken it
                self._machine.set_state(*snapshot)
                self._fail(PeerError("This process was too far behind the others to tell what became of the request."))
                self._wake(*self._changes)
            self._apply_records(records)
