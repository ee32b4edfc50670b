"""The service: every change is a command in the store's log. Commands are applied in the order of the log.

All service processes that share a store have the same queues, also after a restart (see `state_machine`). A command is
applied and answered when it is durable. All code runs in the event loop's thread, unless a docstring says otherwise.
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
SNAPSHOT_BYTES = 4 << 20  # bytes of commands between two snapshots; a restart replays 20,000 commands in a second
ANSWER_DEADLINE = 60.0  # seconds until a command must be durable and applied
_COMMANDS_PER_TURN = 64  # number of commands that are applied before other tasks run
_EXPIRY_PERIOD = 0.5  # seconds between two checks for ended leases and silent environments
_WAIT, _WAIT_CLOSING = 1.0, 0.2  # seconds to wait for commands of other processes: normally, and during `close`
_RETRY = 0.5  # seconds until the next read of a store that did not answer
_NEARLY_FULL = 0.8  # fraction of the byte limit above which environments should start no new groups
_ORPHAN_GRACE = 60.0  # seconds before orphaned payloads are deleted, because other processes may still read them
# Commands with the argument `now`.
_COMMANDS_WITH_TIME = frozenset(("register", "reset", "register_env", "heartbeat", "add", "take", "renew", "expire"))

_logger = logging.getLogger(__name__)


class _PendingCommand(NamedTuple):
    """A command that this process has submitted and not yet applied."""

    run: str
    command: str
    arguments: Mapping[str, Any]
    payload: bytes | None
    size: int  # size of the record in bytes
    answer: asyncio.Future[CommandResult]


class Service:
    """All runs of one store.

    Args:
        store, max_bytes: The store, which `close` closes, and the limit of the bytes of all groups.
        snapshot_bytes: Bytes of commands between two snapshots, or the size of the last snapshot if that is larger.
        answer_deadline: Seconds until a command must be durable and applied.

    Attributes:
        decode_lock: A lock for decoding a group, which takes milliseconds. So groups are decoded one at a time.
        failed: The error of the store if it failed and accepts nothing more, otherwise None.
        on_failure: Called when the store fails.
        closing: True if the service is about to end. Then requests no longer wait for data.
        pending_bytes: Bytes of groups that are being written.
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
        self.decode_lock = asyncio.Lock()
        self.failed: StoreError | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.closing = False
        self.pending_bytes = 0
        self._snapshot_bytes = snapshot_bytes
        self._snapshot_due = snapshot_bytes  # bytes of commands until the next snapshot
        self._answer_deadline = answer_deadline
        self._machine = StateMachine()
        self._origin = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._pending: dict[int, _PendingCommand] = {}
        self._durable: deque[tuple[concurrent.futures.Future[int], int]] = deque()
        self._draining = False
        self._changes: dict[str, asyncio.Event] = {}  # for each run, an event that is set at the next change
        self._background: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None
        self._orphaned: list[int] = []  # orphaned payloads, found at startup

    # Startup and shutdown

    def restore(self, fresh: bool = False) -> None:
        """Restore the state before `start`. `fresh` resets all runs. Raise the errors of `StateMachine.restore`."""
        self._snapshot_due -= self._machine.restore(self.store)
        if fresh:
            self._machine.reset_all_runs(self.store)
        self._orphaned = self._machine.orphaned_payloads(self.store)

    async def start(self) -> None:
        """Start accepting commands."""
        self._loop = asyncio.get_running_loop()
        self._run_in_background(self._expire_periodically())
        if self.store.shared:
            self._following = self._loop.create_task(self._follow(cast(SharedStore, self.store)))
        # After a crash, some payloads belong to no group. Other processes may still read some of them.
        self._loop.call_later(_ORPHAN_GRACE if self.store.shared else 0.0, self._delete_payloads, self._orphaned)

    def stop_waiting(self) -> None:
        """Answer all requests that wait for data, because the service is about to end."""
        self.closing = True
        self._wake(*self._changes)

    async def close(self) -> None:
        """Write pending commands and a snapshot, and close the store."""
        self.stop_waiting()
        for task in self._background:
            task.cancel()
        try:
            await asyncio.gather(*self._background, return_exceptions=True)
            if answers := [submitted.answer for submitted in self._pending.values()]:
                await asyncio.wait(answers, timeout=10.0)
            if self._following is not None:  # this task ends when no command is pending
                self._fail(PeerError("The service ended before the store confirmed the request."))
                await asyncio.wait([self._following], timeout=10.0)
            if self.failed is None and self._machine.position > self._machine.snapshot_position:
                await self._snapshot()
        finally:
            await asyncio.to_thread(self.store.close)

    # Commands

    async def submit(self, run: str, command: str, payload: bytes | None = None, **arguments: Any) -> Any:
        """Log a command of `Queue`. When the command is durable and applied, return the answer.

        Args:
            run: Name of the run. Only commands in `RUN_CREATING_COMMANDS` create a missing run.
            payload, arguments: Payload of the command `add`, and arguments of the command without `now`.

        Raises:
            UsageError: The command is invalid.
            UnavailableError: The store accepts nothing now, or there are too many runs. Nothing was stored.
            PeerError: The store did not answer. The command may still take effect.
            StoreError: The store failed.
        """
        return (await self._submit(run, command, arguments, payload)).answer

    async def take(self, run: str, **arguments: Any) -> tuple[LeasedBatch, list[bytes]] | None:
        """Take a batch with its payloads, if any. Raises as `submit`, and UnavailableError if a payload is lost."""
        applied = await self._submit(run, "take", arguments)
        batch = applied.answer
        if batch is None:
            self._delete_payloads(applied.released)
            return None
        payloads = await asyncio.to_thread(self.store.payloads, batch.group_ids)
        self._delete_payloads(applied.released)
        found = [payload for payload in payloads if payload is not None]
        if len(found) == len(payloads):
            return batch, found
        # A payload is damaged, or a new epoch began. Acknowledge a leased batch, so that it is not redelivered forever.
        if batch.lease_until is not None:
            await self.submit(run, "ack", batch_id=batch.batch_id)
        lost = f"{len(payloads) - len(found)} of its {len(payloads)} groups can no longer be read from the store"
        error = f"Batch {batch.batch_id} of run {run!r} is dropped: {lost}. Request the next one."
        _logger.error("%s", error)
        raise UnavailableError(error)

    def submit_later(self, run: str, command: str, **arguments: Any) -> None:
        """Submit a command without waiting for its answer."""
        self._run_in_background(self._submit_or_warn(run, command, arguments))

    async def _submit_or_warn(self, run: str, command: str, arguments: Mapping[str, Any]) -> None:
        try:
            await self._submit(run, command, arguments)
        except RlframeError as error:
            _logger.warning("%s in run %r: %s", command, run, error)

    async def _submit(
        self, run: str, command: str, given: Mapping[str, Any], payload: bytes | None = None
    ) -> CommandResult:
        if self.failed is not None:
            raise self.failed
        arguments = {**given, "now": time.time()} if command in _COMMANDS_WITH_TIME else given
        queues = self._machine.queues
        if command in RUN_CREATING_COMMANDS and run not in queues and len(queues) >= MAX_RUNS:
            raise UnavailableError(f"There are {MAX_RUNS} runs already. Use one of them, or another store.")
        number = next(self._numbers)
        record = encode_command((run, command, arguments, self._origin, number))
        submitted = _PendingCommand(run, command, arguments, payload, len(record), self._loop.create_future())
        self._pending[number] = submitted
        self.pending_bytes += len(payload or b"")
        try:
            future = self.store.append(record, payload)
        except BaseException:
            self._remove_pending(number)
            raise
        future.add_done_callback(functools.partial(self._on_durable, number))
        try:
            applied = await asyncio.wait_for(submitted.answer, self._answer_deadline)
        except asyncio.TimeoutError:
            waited = f"The store did not confirm the request within {self._answer_deadline:g} s."
            raise PeerError(f"{waited} It may still take effect.") from None
        if isinstance(applied.answer, Exception):
            raise applied.answer
        return applied

    # Reads

    def queue(self, run: str) -> Queue:
        """Return the queue of a run. Do not change it. For a missing run, return an empty queue."""
        return self._machine.queues.get(run) or Queue()

    @property
    def runs(self) -> list[str]:
        return sorted(self._machine.queues)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all groups whose payloads are still needed."""
        return self._machine.stored_bytes

    @property
    def byte_limit(self) -> int:
        """Limit of the stored bytes: `max_bytes`, or less if the store's disk has less space."""
        left = self.store.room()
        return self._max_bytes if left is None else min(self._max_bytes, self.stored_bytes + left)

    @property
    def nearly_full(self) -> bool:
        """True if environments should start no new groups because the store is nearly full."""
        return self.stored_bytes + self.pending_bytes >= _NEARLY_FULL * self.byte_limit

    def check_room(self, size: int) -> None:
        """Raise `UnavailableError` if there is no room for `size` more bytes of groups."""
        if self.stored_bytes + self.pending_bytes + size > self._max_bytes:
            kept = self.stored_bytes >> 20
            raise UnavailableError(
                f"The service stores {kept} MB of groups, which is its limit. Trainers must take some groups first."
            )
        self.store.check_room(self.pending_bytes + size)

    async def wait_for_change(self, run: str, timeout: float) -> None:
        """Wait until a command is applied in this run, the service ends, or `timeout` seconds have passed."""
        if run in self._machine.queues and not self.closing:
            change = self._changes.setdefault(run, asyncio.Event())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(change.wait(), timeout)

    async def latest_groups(self, run: str, count: int) -> list[bytes]:
        """Return the payloads of the latest groups, newest first. Payloads that no longer exist are left out."""
        newest = self._machine.latest.newest(run, count)
        missing = [position for position, payload in newest.items() if payload is None]
        newest |= zip(missing, await asyncio.to_thread(self.store.payloads, missing) if missing else ())
        return [payload for payload in newest.values() if payload is not None]

    # Applying commands in the order of the log

    def _on_durable(self, number: int, future: concurrent.futures.Future[int]) -> None:
        """Schedule a durable command to be applied. The store's thread calls this in the order of positions."""
        self._durable.append((future, number))
        if not self._draining:
            self._draining = True
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._draining = False  # set first, so that a later command schedules another `_drain`
        for _ in range(_COMMANDS_PER_TURN):
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
        """Apply a command of this process, and answer its request."""
        run, command, arguments, payload, size, _ = self._pending[number]
        applied = self._machine.apply(position, run, command, arguments, payload)
        waited_for = self._remove_pending(number)
        if waited_for is not None:
            waited_for.answer.set_result(applied)
        if waited_for is None or command != "take":  # `take` deletes the payloads after it has read them
            self._delete_payloads(applied.released)
        self._count_applied(run, size)

    def _apply_records(self, records: list[tuple[int, bytes]]) -> None:
        """Apply commands of any process, and answer the requests of this process."""
        for position, record in records:
            run, command, arguments, origin, number = decode_command(record)
            if origin == self._origin and number in self._pending:
                self._apply_submitted(position, number)
                continue
            applied = self._machine.apply(position, run, command, arguments)
            if origin == self._origin:  # the request for this command has timed out
                self._delete_payloads(applied.released)
            self._count_applied(run, len(record))

    def _count_applied(self, run: str, size: int) -> None:
        """Wake the requests that wait for a change in this run, and take a snapshot if it is due."""
        self._wake(run)
        self._snapshot_due -= size
        if self._snapshot_due <= 0 and not self.closing:
            self._snapshot_due = self._snapshot_bytes
            self._run_in_background(self._snapshot())

    def _wake(self, *runs: str) -> None:
        """Wake the requests that wait for a change in these runs."""
        for run in runs:
            if change := self._changes.pop(run, None):
                change.set()

    def _remove_pending(self, number: int) -> _PendingCommand | None:
        """Remove a pending command. Return the command if a request still waits for its answer, otherwise None."""
        submitted = self._pending.pop(number, None)
        if submitted is None:
            return None
        self.pending_bytes -= len(submitted.payload or b"")
        return None if submitted.answer.done() else submitted

    def _fail(self, error: BaseException, *numbers: int) -> None:
        """Answer pending commands with an error: the given commands, or all. A `StoreError` fails the whole service."""
        if isinstance(error, StoreError) and self.failed is None:
            self.failed = error
            self.on_failure()
        for number in numbers or list(self._pending):
            if (submitted := self._remove_pending(number)) is not None:
                submitted.answer.set_exception(error)

    def _delete_payloads(self, positions: list[int]) -> None:
        if positions:
            with contextlib.suppress(RlframeError):  # the next start deletes orphaned payloads
                self.store.delete_payloads(positions)

    # Background tasks

    async def _snapshot(self) -> None:
        """Store the current state, so that the next start need not read the earlier part of the log."""
        position = self._machine.snapshot_position = self._machine.position
        try:
            encoded = await asyncio.to_thread(encode_state, self._machine.get_state())
            self._snapshot_due = max(self._snapshot_bytes, len(encoded))
            await asyncio.wrap_future(self.store.snapshot(position, encoded))
        except RlframeError as error:
            _logger.warning("No snapshot was taken: %s", error)
        except Exception:  # not fatal, because the log has everything
            _logger.exception("No snapshot was taken.")

    async def _expire_periodically(self) -> None:
        while not self.closing:
            await asyncio.sleep(_EXPIRY_PERIOD)
            now = time.time()
            for run, queue in list(self._machine.queues.items()):
                if queue.due(now) and self.failed is None:
                    await self._submit_or_warn(run, "expire", {})

    def _run_in_background(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _follow(self, store: SharedStore) -> None:
        """Apply the commands of all processes of a shared store, until the service closes and no command is pending."""
        while not self.closing or self._pending:
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
            if snapshot is not None:  # another process took the snapshot
                self._machine.set_state(*snapshot)
                self._fail(PeerError("This process fell too far behind the others. The request may have taken effect."))
                self._wake(*self._changes)
            self._apply_records(records)
