"""The replay buffer behind a Reverb server: for actors and learners on any number of machines.

Reverb: A Framework For Experience Replay (Cassirer et al. 2021), https://arxiv.org/abs/2102.04736

A writer completes its items in its own process, exactly as the buffer in memory does, and sends them when they are
complete. A uniform or prioritized replay holds each item by itself, so that the server's own selectors draw it. A queue
may hold blocks of items (`tables(block=)`): whole unrolls `[B, T, ...]` at once, and a hundred times as many steps per
second.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlframe.errors import CheckpointError, UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.interprocess.heartbeat import peer_timeout
from rlframe.replay.base import BaseReplayBuffer, Dataset, override
from rlframe.replay.rate_limiter import WriterQuorum, WriterState, default_run_ahead
from rlframe.replay.reverb.connection import HIGHEST, REPLAY, ReverbConnection
from rlframe.replay.reverb.item_bytes import DrawnItems, ItemRows, ReverbDataset, ServerKeys
from rlframe.replay.reverb.ranks import RankRegistry
from rlframe.replay.reverb.server_tables import (
    ReverbTables,
    block_size,
    inserted,
    may_sample,
)
from rlframe.replay.reverb.writer import ReverbWriter
from rlframe.replay.tables import MIN_PRIORITY
from rlframe.types import AgentSpecs, Batch, Step

_DRAW_TIMEOUT = 10.0  # for what the server said it has: only another reader that was quicker has it wait


class ReverbReplayBuffer(BaseReplayBuffer):
    """One process's side of a replay that a Reverb server holds. Pickles as the server's address.

    `add` returns once the server has the items; where the server holds them back (a full queue, or samples that are
    behind `samples_per_insert`), it waits for up to `patience` seconds. `sample` never waits for items.

    A server that is gone is waited for, for `timeout` seconds; one that comes back at the same address is used again.
    What it has then is what its checkpointer restored, and what its writers had not seen confirmed.

    Args:
        agent: an Agent (anything with `replay_spec` and `step_spec`), as the server's tables were made from.
        server: a `reverb.Client`, or "host:port".
        timeout: seconds that a server which does not answer is waited for; None: 120, or 600 in a process that is
            watched (`rlframe.interprocess.heartbeat`), as those of a program are.
        patience: seconds that `add` waits for a server which holds it back; None: 600, or for ever in such a process.

    Raises (every method that asks the server):
        PeerError: it did not answer in time.
        UsageError: its tables are those of another agent.
    """

    def __init__(
        self, agent: Any = None, server: Any = None, *, timeout: float | None = None, patience: float | None = None
    ) -> None:
        if agent is None or server is None:
            raise UsageError(
                "A ReverbReplayBuffer is made of an agent and a server's client or address. For the node of a program, "
                "write lp.ReverbNode(ReverbReplayBuffer.tables(agent))."
            )
        self.spec = agent.replay_spec
        self._agent = AgentSpecs(agent.replay_spec, agent.step_spec)
        self._rows = ItemRows(self._agent)
        address = server if isinstance(server, str) else server.server_address
        self._options: dict[str, Any] = {"timeout": timeout, "patience": patience}
        timeout = peer_timeout(120.0, watched=600.0) if timeout is None else timeout
        self._connection = ReverbConnection(address, timeout)
        self._registry = RankRegistry(self._connection, timeout)
        self._block = 0  # items per row of the table; 0 before the server was asked
        patience = peer_timeout(600.0) if patience is None else patience
        self._writer = ReverbWriter(self._agent, self._connection, self._registry, self._rows, patience)
        self._read_lock = threading.RLock()
        self._dropped = 0
        is_queue = self.spec.kind == "queue"
        self._drawn = DrawnItems(self._rows, queue=is_queue, by_rank=is_queue and self.spec.batch_size is None)
        self._quorum = WriterQuorum(self.spec.lapse_after)
        self._envs: dict[int, int] = {}  # of each rank, as last asked
        self._server_keys = ServerKeys()

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(ReverbReplayBuffer, **self._options), (self._agent, self._connection.address)

    @staticmethod
    def tables(
        agent: Any,
        *,
        block: int = 1,
        when_full: Literal["wait", "drop"] = "wait",
        run_ahead: int | None = None,
        **overrides: Any,
    ) -> ReverbTables:
        """Return the tables of a server for an agent: `lp.ReverbNode(ReverbReplayBuffer.tables(agent))`.

        Args:
            agent: an Agent (anything with `replay_spec` and `step_spec`).
            block: of a queue, items that are sent, held and drawn as one; each writer's `num_envs` is a multiple of it.
                Right where all of an actor's environments complete their unrolls with the same step.
            when_full: whether writers "wait" for the reader of a full queue, or "drop" the oldest items.
            run_ahead: items that may be added before as many samples were drawn as `samples_per_insert` says.
            overrides: fields of `ReplaySpec` to change.

        Returns:
            A callable that gives a list of `reverb.Table`, as `lp.ReverbNode` expects. It can be iterated over as well:
            `reverb.Server(tables, port)`.
        """
        spec = override(agent.replay_spec, overrides)
        ahead = default_run_ahead(spec) if run_ahead is None else run_ahead
        return ReverbTables(AgentSpecs(spec, agent.step_spec), block, when_full, ahead)

    # --- writing

    def claim_rank(self, num_envs: int | None = None, rank: int | None = None) -> tuple[int, int]:
        return self._writer.claim(self._connect(), num_envs, rank)

    def open_segment(self, rank: int, num_envs: int) -> None:
        self._writer.open(self._connect(), rank, num_envs)

    def add(self, env_ids: np.ndarray, step: Step) -> None:
        """Add one step of the environments `env_ids`; see `BaseReplayBuffer`. It may wait; see the class.

        Raises:
            StoppedError: it was told to, by `end_waits`, or the buffer was closed.
        """
        self._writer.add(env_ids, step)

    def end_waits(self, rank: int) -> None:
        """See `BaseReplayBuffer`. What `add` had on its way is still sent, until the buffer is closed."""
        self._writer.end_waits(rank)

    # --- reading

    def sample(self) -> Batch | None:
        """Draw a batch, or return None while the server has too little or is ahead of `samples_per_insert`.

        Draws are the server's, so no seed repeats them. `probabilities` are those at the time of each draw.
        """
        if self._connection.closed.is_set():
            return None
        self._connect()
        with self._read_lock:
            table = self._connection.info("sample")[REPLAY]
            count = self.batch_size()
            if self.spec.kind == "queue":
                self._draw_queue(count, table.current_size)
            elif self.missing(count) > 0 and may_sample(table, count):
                self.keep(self._connection.draw(REPLAY, self.missing(count), _DRAW_TIMEOUT))
            number = self.items_to_take(count)
            return self.take(number) if number else None

    def _draw_queue(self, count: int, left: int) -> None:
        # What is missing is taken even if too little is there: a writer that has yet to add the rest must not be held
        # up by a full queue.
        while left > 0 and (missing := self.missing(count)) > 0:
            drawn = self._connection.draw(REPLAY, min(missing, left), _DRAW_TIMEOUT)
            self.keep(drawn)
            left = left - len(drawn) if drawn else 0

    def batch_size(self) -> int:
        """Return the number of items of a full batch; 0 if that is one of each environment, and none is known yet."""
        if self.spec.batch_size is not None:
            return self.spec.batch_size
        self._envs = self._registry.envs()
        return sum(self._envs.values())

    def items_to_take(self, count: int) -> int:
        """Return how many items, of `count` that all writers would give, make a batch now; 0 while there is too little.

        A server does not know which of its writers live. So where a batch is one item of each environment, the share of
        those lapses from whom nothing came for `lapse_after` seconds while others' items wait.
        """
        with self._read_lock:
            if not count or self.missing(count) <= 0:
                return count
            if self.spec.kind != "queue" or self.spec.batch_size is not None or self._drawn.size < self.spec.min_size:
                return 0
            received = self._drawn.received
            writers = {rank: WriterState(envs, received[rank], lambda: True) for rank, envs in self._envs.items()}
            return self._quorum.complete_items(writers, self._drawn.items_by_rank())

    def forget_before(self, version: int) -> None:
        if self.spec.kind == "queue":
            with self._read_lock:
                self._drawn.forget_before(version)

    def missing(self, count: int) -> int:
        """Return how many of the server's items (blocks, in a queue of these) must be drawn for a batch of `count`."""
        least = max(count, self.spec.min_size) if self.spec.kind == "queue" else count
        return -(-(least - self._drawn.size) // self._block)

    def keep(self, drawn: list[Any]) -> None:
        """Keep drawn items for `take`."""
        with self._read_lock:
            self._drawn.put(drawn)

    def take(self, count: int) -> Batch:
        """Return a batch of items that were drawn; see `missing`."""
        with self._read_lock:
            rows, probabilities, server_keys = self._drawn.take(count)
            batch = self._rows.unpack(rows, probabilities)
            if self.spec.kind == "prioritized":
                self._server_keys.put(batch.keys, server_keys)
            return batch

    def make_dataset(self, prefetch: int = 2, timeout: float | None = None, threads: int = 2) -> Dataset:
        """Return an endless iterator of batches, `prefetch` of which a thread draws ahead, beside Reverb itself.

        Items come by `threads` of Reverb's samplers at once, those of a queue by one. Items that were drawn ahead from
        a queue and not read are lost with the dataset. Each `next` waits at most `timeout` seconds for its batch; None:
        see `Dataset`. Close the dataset (or the buffer) to end it; any thread may.
        """
        self._connect()
        dataset = ReverbDataset(self, self._connection, prefetch, timeout, threads)
        self._datasets.append(dataset)
        return dataset

    def _set_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities of items that this process drew.

        Priorities of items that are gone are dropped. They are counted exactly where one process writes; where several
        do, an item whose turn to leave had nearly come may be counted wrongly.
        """
        info = self._connection.info("update_priorities")
        floor = inserted(info[REPLAY]) - info[REPLAY].current_size  # items leave in the order in which they came
        with self._read_lock:
            server_keys = self._server_keys.find(keys, floor)
            self._dropped += server_keys.count(None)
        values = np.maximum(priorities, MIN_PRIORITY).tolist()
        updates = {key: value for key, value in zip(server_keys, values) if key is not None}
        if updates:
            self._connection.set_priorities(REPLAY, updates)
            self._registry.raise_highest_priority(max(updates.values()), inserted(info[HIGHEST]))

    # --- about the server

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._connection.closed.is_set()

    @property
    def size(self) -> int:
        block = self._connect()
        return self._connection.info("size")[REPLAY].current_size * block + self._drawn.size

    def stats(self) -> dict[str, int]:
        """Return counters of the server, over all writers and readers; `steps`, `dropped_priorities`: of this process.

        In a queue of blocks, those that were not full count as full. `bytes` is before Reverb's compression.
        """
        block = self._connect()
        table, waiting = self._connection.info("stats")[REPLAY], self._drawn.size
        forgotten = self._drawn.forgotten
        added, size = inserted(table), table.current_size
        sampled = table.rate_limiter_info.sample_stats.completed
        evicted = added - size - (sampled if self.spec.kind == "queue" else 0)
        return {
            "items": size * block + waiting,
            "steps": self._writer.steps,
            "added": added * block,
            "sampled": sampled * block - waiting - forgotten,
            "evicted": evicted * block + forgotten,
            "evicted_unsampled": evicted * block + forgotten if self.spec.kind == "queue" else 0,
            "dropped_priorities": self._dropped,
            "bytes": size * block * self._rows.nbytes,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Make the server write a checkpoint where its checkpointer says, and note its name in the file `path`.

        Raises:
            CheckpointError: it could not be written.
        """
        self._connect()
        before = inserted(self._connection.info("checkpoint")[REPLAY])
        try:
            saved = self._connection.checkpoint()
            write_atomically(path, json.dumps({"checkpoint": saved, "inserted": before}))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"The replay at {self._connection.address} could not be saved: {error}.") from error

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Check that the server has read the checkpoint of this `save`, or has run on since.

        A Reverb server reads its latest checkpoint when it starts, and at no other time.

        Raises:
            CheckpointError: it did not, or the file cannot be read.
        """
        try:
            saved = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is missing or damaged: {error}.") from error
        self._connect()
        there = inserted(self._connection.info("restore")[REPLAY])
        if there < saved["inserted"]:
            raise CheckpointError(
                f"The Reverb server at {self._connection.address} was given {there} items, but {saved['inserted']} "
                f"when {path} was saved: it has not read its checkpoint {saved['checkpoint']}. Start it with "
                "checkpoint_ctor=lambda: reverb.checkpointers.DefaultCheckpointer(the directory of that)."
            )

    def close(self) -> None:
        """End the datasets and every call that waits. The server keeps running."""
        self._connection.closed.set()
        super().close()
        self._writer.close()

    def _connect(self) -> int:
        """Return how many items a block holds. Raise UsageError if the server's tables are of another agent."""
        if not self._block:
            self._block = block_size(self._connection.signature(REPLAY), self._rows, self._connection.address)
        return self._block
