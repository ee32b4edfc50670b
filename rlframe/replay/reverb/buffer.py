"""The client of a replay on a Reverb server, for actors and learners on any number of machines.

Reverb: A Framework For Experience Replay (Cassirer et al. 2021), https://arxiv.org/abs/2102.04736

A writer makes items in its process, like the in-process buffer does, and sends each complete item to the server. In a
uniform or prioritized replay, each row of the server's table is one item, so Reverb's selectors draw items. In a queue,
a row can be a block of items (`tables(block=)`), such as whole unrolls `[B, T, ...]`. With blocks, the server handles a
hundred times more steps per second.
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
from rlframe.replay.reverb.server_tables import (
    RankRegistry,
    ReverbTables,
    block_size,
    inserted,
    may_sample,
)
from rlframe.replay.reverb.writer import ReverbWriter
from rlframe.replay.tables import MIN_PRIORITY
from rlframe.types import AgentSpecs, Batch, Step

_DRAW_TIMEOUT = 10.0  # seconds to draw available items; a draw waits only if another reader takes them


class ReverbReplayBuffer(BaseReplayBuffer):
    """The client of a replay on a Reverb server, for one process. A pickled client contains the specs and the address.

    `add` returns after the server has received the items. The server blocks `add` if a queue is full, or if sampling is
    behind `samples_per_insert`. Then `add` waits up to `patience` seconds. `sample` never waits for items.

    If the server is unreachable, calls wait up to `timeout` seconds until it is reachable. Clients also continue after
    a restart of the server at the same address. A restarted server has the items of its checkpoint. Writers send items
    again if the server has not confirmed them.

    Args:
        agent: the Agent of the server's tables, or any object with the same `replay_spec` and `step_spec`.
        server: a `reverb.Client`, or "host:port".
        timeout: seconds to wait for a server that does not answer. None means 120, or 600 in a process whose heartbeats
            are watched (`rlframe.interprocess.heartbeat`), such as a node of a program.
        patience: seconds that `add` waits while the server blocks it. None means 600, but no limit in a process whose
            heartbeats are watched.

    Raises (every method that calls the server):
        PeerError: the server did not answer in time.
        UsageError: the server's tables belong to another agent.
    """

    def __init__(
        self, agent: Any = None, server: Any = None, *, timeout: float | None = None, patience: float | None = None
    ) -> None:
        if agent is None or server is None:
            raise UsageError(
                "A ReverbReplayBuffer needs an agent and a server's client or address. For the node of a program, "
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
        self._block = 0  # items per row of the table; 0 before the first call to the server
        patience = peer_timeout(600.0) if patience is None else patience
        self._writer = ReverbWriter(self._agent, self._connection, self._registry, self._rows, patience)
        self._read_lock = threading.RLock()
        self._dropped = 0
        is_queue = self.spec.kind == "queue"
        self._drawn = DrawnItems(self._rows, queue=is_queue, by_rank=is_queue and self.spec.batch_size is None)
        self._quorum = WriterQuorum(self.spec.lapse_after)
        self._envs: dict[int, int] = {}  # rank -> number of environments, from the last `batch_size` call
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
            agent: an Agent, or any object with `replay_spec` and `step_spec`.
            block: number of items of a queue that are sent, stored and drawn as one row. The `num_envs` of each writer
                must be a multiple of `block`. Use blocks if all environments of an actor complete their unrolls at the
                same step.
            when_full: behavior of a full queue. "wait" makes its writers wait for the reader. "drop" drops the oldest
                items.
            run_ahead: number of items by which inserts can be ahead of `samples_per_insert`.
            overrides: fields of `ReplaySpec` to change.

        Returns:
            A callable that returns a list of `reverb.Table`, as `lp.ReverbNode` expects. The result is also an iterable
            of tables, as `reverb.Server(tables, port)` expects.
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
        """Add one step of the environments `env_ids`. See `ReplayWriter.add`. Wait while the server blocks the call.

        Raises:
            StoppedError: `end_waits` was called, or the buffer was closed.
        """
        self._writer.add(env_ids, step)

    def end_waits(self, rank: int) -> None:
        """See `BaseReplayBuffer`. Items that are not confirmed are sent until the buffer is closed."""
        self._writer.end_waits(rank)

    # --- reading

    def sample(self) -> Batch | None:
        """Draw a batch. Return None if there are too few items, or if sampling is ahead of `samples_per_insert`.

        The server draws the items, so a seed cannot repeat the draws. The probability of an item is its probability at
        the time of the draw.
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
        # Draw the available items even if they are too few for a batch. If they stayed in a full queue, the writer of
        # the missing items would be blocked.
        while left > 0 and (missing := self.missing(count)) > 0:
            drawn = self._connection.draw(REPLAY, min(missing, left), _DRAW_TIMEOUT)
            self.keep(drawn)
            left = left - len(drawn) if drawn else 0

    def batch_size(self) -> int:
        """Return the number of items of a full batch.

        If a batch has one item of each environment, return 0 until a writer is known.
        """
        if self.spec.batch_size is not None:
            return self.spec.batch_size
        self._envs = self._registry.envs()
        return sum(self._envs.values())

    def items_to_take(self, count: int) -> int:
        """Return the size of the next batch, or 0 if there are too few items. A full batch has `count` items.

        The server does not know which writers are alive. So if a batch has one item of each environment, a writer
        lapses if it sends no items for `lapse_after` seconds while items of other writers are waiting.
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
        """Return the number of rows that must still be drawn for a batch of `count` items."""
        least = max(count, self.spec.min_size) if self.spec.kind == "queue" else count
        return -(-(least - self._drawn.size) // self._block)

    def keep(self, drawn: list[Any]) -> None:
        """Store drawn rows until `take` returns them."""
        with self._read_lock:
            self._drawn.put(drawn)

    def take(self, count: int) -> Batch:
        """Return a batch of `count` stored items. The caller checks that there are enough items."""
        with self._read_lock:
            rows, probabilities, server_keys = self._drawn.take(count)
            batch = self._rows.unpack(rows, probabilities)
            if self.spec.kind == "prioritized":
                self._server_keys.put(batch.keys, server_keys)
            return batch

    def make_dataset(self, prefetch: int = 2, timeout: float | None = None, threads: int = 2) -> Dataset:
        """Return an endless iterator of batches.

        A thread draws `prefetch` batches ahead of time, in addition to Reverb's own prefetching.

        A uniform or prioritized replay uses `threads` parallel samplers of Reverb. A queue uses one sampler. When the
        dataset is closed, items that are drawn from a queue but not read are lost. Each `next` waits at most `timeout`
        seconds for a batch. (For None, see `Dataset`.) To end the iteration, close the dataset or the buffer from any
        thread.
        """
        self._connect()
        dataset = ReverbDataset(self, self._connection, prefetch, timeout, threads)
        self._datasets.append(dataset)
        return dataset

    def _set_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities of items that this process drew.

        Priorities of evicted items are dropped and counted. The count is exact if only one process writes. With several
        writers, the count can be slightly wrong.
        """
        info = self._connection.info("update_priorities")
        floor = inserted(info[REPLAY]) - info[REPLAY].current_size  # the oldest items are evicted first
        with self._read_lock:
            server_keys = self._server_keys.find(keys, floor)
            self._dropped += server_keys.count(None)
        values = np.maximum(priorities, MIN_PRIORITY).tolist()
        updates = {key: value for key, value in zip(server_keys, values) if key is not None}
        if updates:
            self._connection.set_priorities(REPLAY, updates)
            self._registry.raise_highest_priority(max(updates.values()), inserted(info[HIGHEST]))

    # --- counters and checkpoints of the server

    @property
    def size(self) -> int:
        block = self._connect()
        return self._connection.info("size")[REPLAY].current_size * block + self._drawn.size

    def stats(self) -> dict[str, int]:
        """Return the server's counters, which include all writers and readers.

        `steps` and `dropped_priorities` count only in this process.

        In a queue of blocks, each block counts as full. `bytes` is the size before Reverb's compression.
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
        """Make the server write a checkpoint to the directory of its checkpointer.

        Write the path of the checkpoint to the file `path`.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        self._connect()
        before = inserted(self._connection.info("checkpoint")[REPLAY])
        try:
            saved = self._connection.checkpoint()
            write_atomically(path, json.dumps({"checkpoint": saved, "inserted": before}))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"The replay at {self._connection.address} could not be saved: {error}.") from error

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Check that the server has the items of a checkpoint. `save` wrote the name of the checkpoint to `path`.

        A Reverb server loads its latest checkpoint only when it starts.

        Raises:
            CheckpointError: the server was restarted without this checkpoint, or the file cannot be read.
        """
        try:
            saved = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is missing or damaged: {error}.") from error
        self._connect()
        there = inserted(self._connection.info("restore")[REPLAY])
        if there < saved["inserted"]:
            raise CheckpointError(
                f"The Reverb server at {self._connection.address} has received {there} items, but {path} was saved "
                f"after {saved['inserted']}: it has not read its checkpoint {saved['checkpoint']}. Start it with "
                "checkpoint_ctor=lambda: reverb.checkpointers.DefaultCheckpointer(the checkpoint's directory)."
            )

    def close(self) -> None:
        """End the datasets and all waiting calls. The server keeps running."""
        self._connection.closed.set()
        super().close()
        self._writer.close()

    def _connect(self) -> int:
        """Return the number of items in a block. Raise UsageError if the server's tables belong to another agent."""
        if not self._block:
            self._block = block_size(self._connection.signature(REPLAY), self._rows, self._connection.address)
        return self._block
