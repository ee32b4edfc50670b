"""The state machine: the queues of all runs, as the commands of the store's log lead to them. Every process that
applies the same log up to the same position holds the same state."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from rlframe.errors import StoreError, UsageError
from rlframe.trajectories.queue.queue import Queue
from rlframe.trajectories.stores import RecordsDroppedError, Store

LATEST = 20  # groups of a run that people may look at
LATEST_BYTES = 64 << 20  # in memory, of all runs together; the newest group is kept however large it is
_FORMAT = 3  # of snapshots

# What a run begins with. To the other commands one that is not there is empty: a mistyped path leaves nothing behind.
RUN_CREATING_COMMANDS = frozenset(("register", "register_env", "add", "pause", "set_policy_version"))

_logger = logging.getLogger(__name__)

# (run, command, arguments, process that submitted it, its number there)
encode_command = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(tuple[str, str, dict[str, Any], str, int]).decode


class CommandResult(NamedTuple):
    """What a command led to.

    Attributes:
        answer: of the queue; an exception where the command could not be.
        freed: positions of payloads that nobody needs any more, but for who takes this very batch.
    """

    answer: Any
    freed: list[int]


class StateMachine:
    """Attributes:
    queues: of the runs, by name; a run begins with the first of `RUN_CREATING_COMMANDS`. The id of a group is the position of its
        payload.
    position: up to which the log is applied.
    snapshot_position: of the last snapshot.
    stored_bytes: of all groups whose payloads are needed.
    latest: groups, for people who look.
    """

    def __init__(self) -> None:
        self.queues: dict[str, Queue] = {}
        self.position = 0
        self.snapshot_position = 0
        self.stored_bytes = 0
        self.latest = LatestGroups()

    def restore(self, store: Store) -> int:
        """Become what the store holds. Raises `StoreError` or `PeerError` where that cannot be.

        Returns:
            Bytes of the commands that were read.
        """
        snapshot = store.load()
        records: list[tuple[int, bytes]] = []
        read = 0
        while True:
            if snapshot is not None:
                self.set_state(*snapshot)
            for position, record in records:
                self.apply(position, *decode_command(record)[:3])
                read += len(record)
            snapshot, records = read_next(store, self.position)
            if snapshot is None and not records:
                return read

    def reset_all_runs(self, store: Store) -> None:
        """Reset every run, after `restore`. Raises as it does."""
        for run in sorted(self.queues):
            store.append(encode_command((run, "reset", {"now": time.time()}, "", 0))).result()
        self.restore(store)

    def orphaned_payloads(self, store: Store) -> list[int]:
        """Positions of payloads that the store holds, and that nobody will ask for: what a crash left behind."""
        needed = {position for queue in self.queues.values() for position in queue.epoch.needed_group_ids()}
        return [at for at in store.held() if at <= self.position and at not in needed]

    def apply(
        self, position: int, run: str, command: str, arguments: Mapping[str, Any], payload: bytes | None = None
    ) -> CommandResult:
        """Apply the command at a position of the log. `payload`: of an `add`, where it is at hand."""
        queue = self.queues.get(run) or Queue()
        if command in RUN_CREATING_COMMANDS:
            self.queues[run] = queue
        before, epoch = queue.epoch.stored_bytes, queue.epoch
        adds = command == "add"
        try:
            answer = queue.apply(command, {**arguments, "group_id": position} if adds else arguments)
            freed = queue.epoch.released
            kept = adds and answer.group_id is not None
        except Exception as error:  # the same in every process, and whenever the log is read again
            answer, freed, kept = error, [], False
            if not isinstance(error, UsageError):
                _logger.error("%s in run %r failed at position %d: %r", command, run, position, error)
        if queue.epoch is not epoch:
            self.latest.clear(run)
        if kept:
            self.latest.add(run, position, payload)
        elif adds:
            freed = [position, *freed]
        self.stored_bytes += queue.epoch.stored_bytes - before
        self.position = position
        return CommandResult(answer, freed)

    def get_state(self) -> dict[str, Any]:
        """Of all runs, as data that no later command changes: for `encode_state`, in any thread."""
        return {
            name: {"queue": queue.get_state(), "latest": [*self.latest.newest(name, LATEST)][::-1]}
            for name, queue in self.queues.items()
        }

    def set_state(self, position: int, snapshot: bytes) -> None:
        """Become what it was at this position."""
        state = msgspec.msgpack.decode(snapshot)
        if state["format"] != _FORMAT:
            raise StoreError(f"The store's snapshot is of format {state['format']}; this version reads {_FORMAT}.")
        self.queues, self.latest = {}, LatestGroups()
        for name, run in state["runs"].items():
            self.queues[name] = Queue()
            self.queues[name].set_state(run["queue"])
            for latest in run["latest"]:
                self.latest.add(name, latest, None)
        self.stored_bytes = sum(queue.epoch.stored_bytes for queue in self.queues.values())
        self.position = self.snapshot_position = position


def encode_state(runs: dict[str, Any]) -> bytes:
    """A snapshot of what `get_state` gave."""
    return msgspec.msgpack.encode({"format": _FORMAT, "runs": runs})


def read_next(store: Store, after: int) -> tuple[tuple[int, bytes] | None, list[tuple[int, bytes]]]:
    """What follows a position of the log: (a snapshot, where it took the place of the records; the records)."""
    try:
        return None, store.read(after)
    except RecordsDroppedError:  # another process took a snapshot meanwhile
        snapshot = store.load()
        if snapshot is None or snapshot[0] <= after:
            raise StoreError(
                f"The store lost records after position {after}. Restart the service; if that ends in the same way, "
                "the store is damaged: begin with another."
            ) from None
        return snapshot, []


class LatestGroups:
    """Where the latest groups of each run lie in the store, and the payloads of those that came through this process,
    as far as memory is spared: a group that was served is in the store no longer."""

    def __init__(self) -> None:
        self._positions: dict[str, deque[int]] = {}
        self._payloads: OrderedDict[int, bytes] = OrderedDict()
        self._bytes = 0

    def add(self, run: str, position: int, payload: bytes | None) -> None:
        positions = self._positions.setdefault(run, deque(maxlen=LATEST))
        if len(positions) == LATEST:
            self._drop(positions[0])
        positions.append(position)
        if payload is not None:
            self._payloads[position] = payload
            self._bytes += len(payload)
        while self._bytes > LATEST_BYTES and len(self._payloads) > 1:
            self._drop(next(iter(self._payloads)))

    def clear(self, run: str) -> None:
        """The run starts afresh."""
        for position in self._positions.pop(run, ()):
            self._drop(position)

    def newest(self, run: str, count: int) -> dict[int, bytes | None]:
        """Return the payloads of the latest groups by position, newest first; None: read it from the store."""
        return {at: self._payloads.get(at) for at in list(self._positions.get(run, ()))[: -count - 1 : -1]}

    def _drop(self, position: int) -> None:
        self._bytes -= len(self._payloads.pop(position, b""))
