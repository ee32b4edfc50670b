"""The state machine: all runs, as the commands of the log lead to them. Every process that applies the same log up to
the same position holds the same state."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from rlframe.errors import StoreError, UsageError
from rlframe.trajectories.service import snapshots
from rlframe.trajectories.service.latest import Latest
from rlframe.trajectories.service.run import Applied, Run
from rlframe.trajectories.stores import RecordsDroppedError, Store

_logger = logging.getLogger(__name__)

# (run, command, arguments, process that submitted it, its number there)
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(tuple[str, str, dict[str, Any], str, int]).decode

# What a run begins with. To the other commands one that is not there is empty: a mistyped path leaves nothing behind.
BEGINNING = frozenset(("register", "register_env", "add", "pause", "set_policy_version"))


class Machine:
    """Attributes:
    runs: by name; one begins with the first of `BEGINNING`.
    position: up to which the log is applied.
    snapshot_position, snapshot_size: of the last snapshot, in bytes.
    logged: bytes of commands since then.
    stored_bytes: of all groups whose payloads are needed.
    latest: groups, for people who look.
    """

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.position = 0
        self.snapshot_position = 0
        self.snapshot_size = 0
        self.logged = 0
        self.stored_bytes = 0
        self.latest = Latest()

    def restore(self, store: Store) -> None:
        """Becomes what the store holds. Raises `StoreError` or `PeerError` where that cannot be."""
        snapshot = store.load()
        while True:
            if snapshot is not None:
                self.set_state(*snapshot)
            try:
                while records := store.read(self.position):
                    for position, record in records:
                        run, command, arguments, _, _ = decode(record)
                        self.apply(position, run, command, arguments, len(record))
                return
            except RecordsDroppedError:  # another process took a snapshot meanwhile
                snapshot = store.load()
                if snapshot is None or snapshot[0] <= self.position:
                    error = f"The store is damaged: it lost records after position {self.position}. Begin with another."
                    raise StoreError(error) from None

    def unneeded(self, store: Store) -> list[int]:
        """Positions of payloads that the store holds, and that nobody will ask for: what a crash left behind."""
        needed = {position for run in self.runs.values() for position in run.queue.held()}
        return [at for at in store.held() if at <= self.position and at not in needed]

    def apply(
        self,
        position: int,
        run: str,
        command: str,
        arguments: Mapping[str, Any],
        size: int,
        payload: bytes | None = None,
    ) -> Applied:
        """Applies the command at a position of the log.

        Args:
            size: bytes of its record.
            payload: of an `add`, where it is at hand.
        """
        state = self.runs.get(run) or Run()
        if command in BEGINNING:
            self.runs[run] = state
        before, epoch = state.queue.stored_bytes, state.queue.epoch
        applied = state.apply(position, command, arguments)
        if state.queue.epoch != epoch:
            self.latest.clear(run)
        if isinstance(applied.answer, Exception) and not isinstance(applied.answer, UsageError):
            _logger.error("%s in run %r failed at position %d: %r", command, run, position, applied.answer)
        if command == "add" and applied.freed[:1] != [position]:
            self.latest.add(run, position, payload)
        self.stored_bytes += state.queue.stored_bytes - before
        self.position = position
        self.logged += size
        return applied

    def get_state(self) -> dict[str, Any]:
        """Of all runs, as plain data that no later command changes: for `snapshots.encode`."""
        return {
            name: {"queue": run.queue.get_state(), "latest": self.latest.positions(name)}
            for name, run in self.runs.items()
        }

    def set_state(self, position: int, snapshot: bytes) -> None:
        """Becomes what it was at this position."""
        self.runs, self.latest = {}, Latest()
        for name, state in snapshots.decode(snapshot).items():
            self.runs[name] = Run()
            self.runs[name].queue.set_state(state["queue"])
            for latest in state["latest"]:
                self.latest.add(name, latest, None)
        self.stored_bytes = sum(run.queue.stored_bytes for run in self.runs.values())
        self.position = self.snapshot_position = position
        self.logged, self.snapshot_size = 0, len(snapshot)
