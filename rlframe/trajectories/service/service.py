"""The service: every change is a command in the store's log, applied in the order of the log (see `machine`).

All service processes of one store hold the same queues, and after a restart the log leads to the same state. A command
is applied, and answered, once it is durable. Everything here but what names a thread runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rlframe.errors import PeerError, RlframeError, StoreError, UnavailableError
from rlframe.trajectories.queue.leases import Batch
from rlframe.trajectories.queue.queue import Queue
from rlframe.trajectories.service import snapshots
from rlframe.trajectories.service.follower import Follower
from rlframe.trajectories.service.machine import BEGINNING, Machine, decode, encode
from rlframe.trajectories.service.pending import Command, Pending
from rlframe.trajectories.service.run import Applied
from rlframe.trajectories.stores import Store

MAX_RUNS = 1000
SNAPSHOT_BYTES = 4 << 20  # of commands: about 20,000, and a second of replaying them
_AT_ONCE = 64  # commands that are applied before the event loop does something else
_TICK = 0.5  # seconds between looks at the clock, for leases and silent environments
_ANSWER = 60.0  # seconds for a command to be durable and applied
_NEARLY = 0.8  # of the bytes that may be kept
_GRACE = 60.0  # seconds for another process to read what it has just taken, before what nobody needs is swept
_TIMED = frozenset(("register", "reset", "register_env", "heartbeat", "add", "take", "renew", "expire"))  # take `now`

_logger = logging.getLogger(__name__)


class FullError(UnavailableError):
    """The service keeps as many bytes as it may."""


class Service:
    """All runs of one store.

    Args:
        store: it is closed by `close`.
        max_bytes: of groups that are kept.
        snapshot_bytes: a snapshot is taken after so many bytes of commands; or after as many as the last one had, so
            that a long queue is not written down again and again.
    """

    def __init__(self, store: Store, *, max_bytes: int, snapshot_bytes: int = SNAPSHOT_BYTES) -> None:
        self.store = store
        self._machine = Machine()
        self.turn = asyncio.Lock()  # of whoever decodes a group, which takes milliseconds
        self.failed: StoreError | None = None  # what the store takes nothing more for
        self.on_failure: Callable[[], None] = lambda: None
        self.max_bytes = max_bytes
        self._snapshot_bytes = snapshot_bytes
        self._origin = secrets.token_hex(6)
        self._pending = Pending()
        self._durable: deque[tuple[concurrent.futures.Future[int], int]] = deque()
        self._draining = False
        self._closing = False
        self._background: set[asyncio.Task[None]] = set()
        self._follower: Follower | None = None
        self._left: list[int] = []  # payloads that nobody needed when this process started

    # Life

    def restore(self) -> None:
        """Brings back what the store holds, before `start`. Raises `StoreError` or `PeerError` where that cannot be."""
        self._machine.restore(self.store)
        self._left = self._machine.unneeded(self.store)

    async def start(self) -> None:
        """Begins to take commands."""
        self.loop = asyncio.get_running_loop()
        self._later(self._tick())
        if self.store.shared:
            self._follower = Follower(self, self._machine.position)
        # What a crash left behind; another process may just be reading what it took.
        self.loop.call_later(_GRACE if self.store.shared else 0.0, self._forget, self._left)

    def stop_waiting(self) -> None:
        """Nobody waits for data any more: the service is about to end."""
        self._closing = True
        for run in self._machine.runs.values():
            run.wake()

    @property
    def closing(self) -> bool:
        return self._closing

    @property
    def idle(self) -> bool:
        """It is closing, and nothing that was submitted is still to be applied."""
        return self._closing and not self._pending

    @property
    def stored_bytes(self) -> int:
        """Of all groups whose payloads are needed."""
        return self._machine.stored_bytes

    @property
    def pending_bytes(self) -> int:
        """Of groups that are being written."""
        return self._pending.bytes

    async def close(self) -> None:
        """Writes what was submitted, and a snapshot, and closes the store."""
        self.stop_waiting()
        for task in self._background:
            task.cancel()
        try:
            await asyncio.gather(*self._background, return_exceptions=True)
            await self._pending.wait(10.0)
            if self._follower is not None:  # it ends once nothing is pending
                self._pending.fail_all(PeerError("The service ended before the store told what became of the request."))
                await self.loop.run_in_executor(None, self._follower.join, 10.0)
            if self.failed is None and self._machine.position > self._machine.snapshot_position:
                await self._snapshot()
        finally:
            await self.loop.run_in_executor(None, self.store.close)

    # Commands

    async def submit(self, run: str, command: str, payload: bytes | None = None, **arguments: Any) -> Any:
        """Logs a command of `Queue` and returns its answer, once it is durable and applied.

        Args:
            run: it begins with the first of `BEGINNING`. To the others one that is not there is empty.
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
            payloads = await self.loop.run_in_executor(None, self.store.payloads, batch.group_ids)
        self._forget(applied.freed)
        if batch is None:
            return None
        found = [payload for payload in payloads if payload is not None]
        if len(found) == len(payloads):
            return batch, found
        # Damaged, or a new epoch began meanwhile. A lease would bring it back again and again; what is intact goes too.
        if batch.lease_until is not None:
            await self.submit(run, "ack", batch_id=batch.batch_id)
        error = (
            f"Batch {batch.batch_id} of run {run!r} is dropped: of its {len(payloads)} groups "
            f"{len(payloads) - len(found)} can no longer be read from the store. Ask for the next one."
        )
        _logger.error("%s", error)
        raise UnavailableError(error)

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
        if command in _TIMED:
            arguments = {**arguments, "now": time.time()}
        runs = self._machine.runs
        if command in BEGINNING and run not in runs and len(runs) >= MAX_RUNS:
            raise UnavailableError(f"There are {MAX_RUNS} runs already. Use one of them, or another store.")
        number = self._pending.next_number
        record = encode((run, command, arguments, self._origin, number))
        pending = Command(run, command, arguments, len(record), payload, self.loop.create_future())
        self._pending.add(pending)
        try:
            future = self.store.append(record, payload)
        except BaseException:
            self._pending.settle(number)
            raise
        future.add_done_callback(functools.partial(self._on_durable, number))
        try:
            applied = await asyncio.wait_for(pending.answer, _ANSWER)
        except asyncio.TimeoutError:
            error = f"The store did not tell within {_ANSWER:g} s what became of the request. It may still take effect."
            raise PeerError(error) from None
        if isinstance(applied.answer, Exception):
            raise applied.answer
        return applied

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
        known = self._machine.runs.get(run)
        return Queue() if known is None else known.queue

    @property
    def runs(self) -> list[str]:
        return sorted(self._machine.runs)

    async def changed(self, run: str, timeout: float) -> None:
        """Returns when a command was applied in this run, after `timeout` seconds, or when the service ends."""
        known = self._machine.runs.get(run)
        if known is None or self._closing:
            return
        waiter = known.changed()
        try:
            await asyncio.wait([waiter], timeout=timeout)
        finally:
            known.forget_waiter(waiter)

    async def latest_groups(self, run: str, count: int) -> list[bytes]:
        """The payloads of the latest groups, newest first, as far as they are still known."""
        missing = self._machine.latest.missing(run, count)
        found = await self.loop.run_in_executor(None, self.store.payloads, missing) if missing else []
        return self._machine.latest.payloads(run, count, dict(zip(missing, found)))

    # Applying, in the order of the log

    def _on_durable(self, number: int, future: concurrent.futures.Future[int]) -> None:
        """On the store's thread, in the order of positions."""
        self._durable.append((future, number))
        if not self._draining:
            self._draining = True
            self.loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._draining = False  # first: what comes from here on schedules another
        for _ in range(_AT_ONCE):
            if not self._durable:
                return
            future, number = self._durable.popleft()
            error = future.exception()
            if error is not None:
                if isinstance(error, StoreError):
                    self._lost(error)
                self._pending.fail(number, error)
            elif not self.store.shared:
                self._apply_pending(future.result(), number)
        self._draining = True
        self.loop.call_soon(self._drain)

    def _apply_pending(self, position: int, number: int) -> None:
        """Applies a command that this process submitted, and answers whoever waits for it."""
        command = self._pending.get(number)
        assert command is not None
        run, name, arguments, size, payload, _ = command
        applied = self._machine.apply(position, run, name, arguments, size, payload)
        waited_for = self._pending.settle(number)
        if waited_for is not None:
            waited_for.answer.set_result(applied)
        if waited_for is None or name != "take":  # who takes a batch reads it first
            self._forget(applied.freed)
        self._applied(run)

    def apply_records(self, records: list[tuple[int, bytes]]) -> None:
        """Applies what any process has submitted, and answers those that were submitted here."""
        for position, record in records:
            run, name, arguments, origin, number = decode(record)
            if origin == self._origin and self._pending.get(number) is not None:
                self._apply_pending(position, number)
                continue
            applied = self._machine.apply(position, run, name, arguments, len(record))
            if origin == self._origin:  # nobody waits for it any more
                self._forget(applied.freed)
            self._applied(run)

    def _forget(self, positions: list[int]) -> None:
        if positions:
            with contextlib.suppress(RlframeError):  # the next start sweeps what is left
                self.store.forget(positions)

    # State

    def _applied(self, run: str) -> None:
        """Something changed in this run."""
        if known := self._machine.runs.get(run):
            known.wake()
        if self._machine.logged >= max(self._snapshot_bytes, self._machine.snapshot_size) and not self._closing:
            self._machine.logged = 0
            self._later(self._snapshot())

    async def _snapshot(self) -> None:
        """Keeps the state as it is now, so that the next start need not read the log before it."""
        position = self._machine.snapshot_position = self._machine.position
        try:
            encoded = await self.loop.run_in_executor(None, snapshots.encode, self._machine.get_state())
            self._machine.snapshot_size = len(encoded)
            await asyncio.wrap_future(self.store.snapshot(position, encoded))
        except RlframeError as error:
            _logger.warning("No snapshot was taken: %s", error)
        except Exception:  # the log has everything
            _logger.exception("No snapshot was taken.")

    # What goes on beside

    def _later(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _tick(self) -> None:
        while not self._closing:
            await asyncio.sleep(_TICK)
            now = time.time()
            for name, run in list(self._machine.runs.items()):
                if run.queue.due(now) and self.failed is None:
                    await self._quietly(name, "expire", {})

    def go_on_from(self, position: int, snapshot: bytes) -> None:
        """Goes on from a snapshot that another process has taken."""
        runs = self._machine.runs
        self._machine.set_state(position, snapshot)
        self._pending.fail_all(
            PeerError("This process was too far behind the others to tell what became of the request.")
        )
        for run in runs.values():
            run.wake()

    def give_up(self, error: StoreError) -> None:
        """The store failed."""
        self._lost(error)
        self._pending.fail_all(error)

    def _lost(self, error: StoreError) -> None:
        """The store takes nothing more."""
        if self.failed is None:
            self.failed = error
            self.on_failure()
