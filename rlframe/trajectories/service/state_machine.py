"""The state machine applies the commands of the store's log to the queues of all runs.

All processes that apply the same log up to the same position have the same state.
"""

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

LATEST = 20  # number of latest groups that are kept for each run, for the live page
LATEST_BYTES = 64 << 20  # memory limit for all runs together; the newest group is always kept
_FORMAT = 3  # format of snapshots

# Commands that create a missing run. Other commands do not create runs, so that a mistyped path has no effect.
RUN_CREATING_COMMANDS = frozenset(("register", "register_env", "add", "pause", "set_policy_version"))

_logger = logging.getLogger(__name__)

# A command in the log: (run, command, arguments, process that submitted it, its number in this process)
encode_command = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(tuple[str, str, dict[str, Any], str, int]).decode


class CommandResult(NamedTuple):
    """The result of a command.

    Attributes:
        answer: The queue's answer, or the exception that it raised.
        released: Positions of payloads that are no longer needed. A request for a batch may read them before they are
            deleted.
    """

    answer: Any
    released: list[int]


class StateMachine:
    """The queues of all runs, and the position in the log.

    Attributes:
        queues: The queue of each run, by name. The id of a group is the position of its payload.
        position: Position up to which the log is applied.
        snapshot_position: Position of the last snapshot.
        stored_bytes: Bytes of all groups whose payloads are still needed.
        latest: The latest groups, for the live page.
    """

    def __init__(self) -> None:
        self.queues: dict[str, Queue] = {}
        self.position = 0
        self.snapshot_position = 0
        self.stored_bytes = 0
        self.latest = LatestGroups()

    def restore(self, store: Store) -> int:
        """Restore the state from a store.

        Returns:
            Bytes of the commands that were read.

        Raises:
            StoreError, PeerError: The store cannot be read.
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
        """Reset every run. Call this method after `restore`. It raises the same errors as `restore`."""
        for run in sorted(self.queues):
            store.append(encode_command((run, "reset", {"now": time.time()}, "", 0))).result()
        self.restore(store)

    def orphaned_payloads(self, store: Store) -> list[int]:
        """Return the positions of stored payloads that no group needs. A crash can leave such payloads."""
        needed = {position for queue in self.queues.values() for position in queue.epoch.needed_group_ids()}
        return [at for at in store.payload_positions() if at <= self.position and at not in needed]

    def apply(
        self, position: int, run: str, command: str, arguments: Mapping[str, Any], payload: bytes | None = None
    ) -> CommandResult:
        """Apply the command at a position of the log. `payload` is the payload of an `add`, if available."""
        queue = self.queues.get(run) or Queue()
        if command in RUN_CREATING_COMMANDS:
            self.queues[run] = queue
        before, epoch = queue.epoch.stored_bytes, queue.epoch
        adds = command == "add"
        try:
            answer = queue.apply(command, {**arguments, "group_id": position} if adds else arguments)
            released = queue.epoch.released
            kept = adds and answer.group_id is not None
        except Exception as error:  # every process and every replay of the log gets the same error
            answer, released, kept = error, [], False
            if not isinstance(error, UsageError):
                _logger.error("%s in run %r failed at position %d: %r", command, run, position, error)
        if queue.epoch is not epoch:
            self.latest.clear(run)
        if kept:
            self.latest.add(run, position, payload)
        elif adds:
            released = [position, *released]
        self.stored_bytes += queue.epoch.stored_bytes - before
        self.position = position
        return CommandResult(answer, released)

    def get_state(self) -> dict[str, Any]:
        """Return the state of all runs. Later commands do not change it, so any thread may call `encode_state`."""
        return {
            name: {"queue": queue.get_state(), "latest": [*self.latest.newest(name, LATEST)][::-1]}
            for name, queue in self.queues.items()
        }

    def set_state(self, position: int, snapshot: bytes) -> None:
        """Restore the state from a snapshot of this position."""
        state = msgspec.msgpack.decode(snapshot)
        if state["format"] != _FORMAT:
            raise StoreError(f"The store's snapshot has format {state['format']}; this version reads format {_FORMAT}.")
        self.queues, self.latest = {}, LatestGroups()
        for name, run in state["runs"].items():
            self.queues[name] = Queue()
            self.queues[name].set_state(run["queue"])
            for latest in run["latest"]:
                self.latest.add(name, latest, None)
        self.stored_bytes = sum(queue.epoch.stored_bytes for queue in self.queues.values())
        self.position = self.snapshot_position = position


def encode_state(runs: dict[str, Any]) -> bytes:
    """Encode the result of `get_state` as a snapshot."""
    return msgspec.msgpack.encode({"format": _FORMAT, "runs": runs})


def read_next(store: Store, after: int) -> tuple[tuple[int, bytes] | None, list[tuple[int, bytes]]]:
    """Read the records after a position of the log.

    Returns:
        (None, records). If a snapshot has replaced the next records: (snapshot, no records).
    """
    try:
        return None, store.read(after)
    except RecordsDroppedError:  # another process took a snapshot
        snapshot = store.load()
        if snapshot is None or snapshot[0] <= after:
            raise StoreError(
                f"The store lost records after position {after}. Restart the service. If the error returns, "
                "the store is damaged: use another one."
            ) from None
        return snapshot, []


class LatestGroups:
    """The latest groups of each run: their positions in the store, and their payloads up to a memory limit.

    The payloads are kept in memory because the store deletes the payloads of served groups.
    """

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
        """Drop the groups of a run that was reset."""
        for position in self._positions.pop(run, ()):
            self._drop(position)

    def newest(self, run: str, count: int) -> dict[int, bytes | None]:
        """Return {position: payload} of the latest groups, newest first. A payload is None if it is not in memory."""
        return {at: self._payloads.get(at) for at in list(self._positions.get(run, ()))[: -count - 1 : -1]}

    def _drop(self, position: int) -> None:
        self._bytes -= len(self._payloads.pop(position, b""))
