"""The writers of one process that add steps to a Reverb replay: their ranks, incomplete items and waits."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Iterator

import numpy as np

from rlframe.errors import StoppedError, UsageError
from rlframe.replay.base import ReplayClosedError
from rlframe.replay.layout import check_added
from rlframe.replay.reverb.connection import HIGHEST, REPLAY, ReverbConnection, ReverbInserter
from rlframe.replay.reverb.item_bytes import ItemRows
from rlframe.replay.reverb.server_tables import RankRegistry, inserted
from rlframe.replay.steps import ItemAssembler
from rlframe.types import AgentSpecs, Step

_STOP_CHECK_INTERVAL = 0.2  # seconds
# Seconds between two checks whether the server has lost the claims of the writers in a restart.
_CHECK_INTERVAL = 1.0


class ReverbWriter:
    """The writers of a `ReverbReplayBuffer`. See that class for the methods. Any thread can call them.

    Args:
        agent: the specs of the agent.
        connection: the connection to the server.
        registry: the ranks of the writers in all processes.
        rows: the format of the rows.
        patience: seconds that `add` waits while the server blocks it.

    Attributes:
        steps: number of steps that were added in this process.
    """

    def __init__(
        self, agent: AgentSpecs, connection: ReverbConnection, registry: RankRegistry, rows: ItemRows, patience: float
    ) -> None:
        self._agent, self._connection, self._registry, self._rows = agent, connection, registry, rows
        self._patience = patience
        self.steps = 0
        self._block = 1  # items per row of the table
        self._lock = threading.RLock()
        self._inserter: ReverbInserter | None = None
        self._claimed: dict[int, int] = {}  # rank -> incarnation in this process
        self._assembler = ItemAssembler(agent)
        self._stop_events: dict[int, threading.Event] = collections.defaultdict(threading.Event)  # by rank
        self._checked_at = 0.0

    def claim(self, block: int, num_envs: int | None, rank: int | None) -> tuple[int, int]:
        """See `BaseReplayBuffer.claim_rank`. Each row of the server's table has `block` items."""
        with self._lock:
            rank, incarnation = self._registry.claim(rank)
            self._claimed[rank] = incarnation
            self._assembler.drop(rank)
            if num_envs is not None:
                self.open(block, rank, num_envs)
            return rank, incarnation

    def open(self, block: int, rank: int, num_envs: int) -> None:
        """See `BaseReplayBuffer.open_segment`."""
        if num_envs < 1:
            raise UsageError(f"A writer needs at least one environment, got num_envs={num_envs}.")
        if num_envs % block:
            raise UsageError(
                f"The queue at {self._connection.address} holds blocks of {block} items, which a writer of {num_envs} "
                f"environments cannot fill. Make the queue's tables with a block that divides {num_envs}."
            )
        with self._lock:
            self._block, incarnation = block, self._claimed[rank]
            self._stop_events[rank] = threading.Event()
            self._assembler.open(rank, incarnation, num_envs)
            if self._agent.replay_spec.batch_size is None:
                self._registry.open(rank, incarnation, num_envs)

    def add(self, env_ids: np.ndarray, step: Step) -> None:
        """See `ReverbReplayBuffer.add`."""
        check_added(env_ids, step)
        stop = self._stop_events[self._assembler.rank_of(env_ids)]
        with self._writing(stop):
            if self._connection.closed.is_set():
                raise ReplayClosedError("The replay buffer is closed. No steps can be added.")
            batch = self._assembler.add(env_ids, step)
            self.steps += len(env_ids)
            if batch is None:
                return
            before, priority = 0, 1.0
            if self._agent.replay_spec.kind == "prioritized":
                info = self._connection.info("add", stop)
                before, priority = inserted(info[REPLAY]), self._registry.highest_priority(inserted(info[HIGHEST]))
            # Number the items of a prioritized table in the order of inserts. Then the number of an item shows whether
            # it is evicted.
            self._assembler.renumber(batch, at_least=before)
            if self._inserter is None:
                self._inserter = ReverbInserter(self._connection, REPLAY, self._patience)
            rows = self._rows.pack(batch)
            if rest := -len(rows) % self._block:
                rows = np.concatenate([rows, self._rows.padding(rest)])
            self._inserter.insert(rows.reshape(-1, self._block, self._rows.nbytes), priority, stop)
            if time.monotonic() - self._checked_at > _CHECK_INTERVAL:
                self._checked_at = time.monotonic()
                self._registry.restore_lost_entries(self._connection.info("add", stop))

    def end_waits(self, rank: int) -> None:
        """See `ReverbReplayBuffer.end_waits`."""
        self._stop_events[rank].set()

    def close(self) -> None:
        """Stop sending items that are not confirmed. Call this after the connection is closed."""
        with self._lock:
            if self._inserter is not None:
                self._inserter.close()

    @contextlib.contextmanager
    def _writing(self, stop: threading.Event) -> Iterator[None]:
        """Hold the lock that all writers of this process share. Raise StoppedError if `stop` is set during the wait.

        If the server blocks one writer of this process, this writer holds the lock for a long time.
        """
        while not self._lock.acquire(timeout=_STOP_CHECK_INTERVAL):
            if stop.is_set():
                raise StoppedError("add was stopped while it waited for another writer of this process.")
        try:
            yield
        finally:
            self._lock.release()
