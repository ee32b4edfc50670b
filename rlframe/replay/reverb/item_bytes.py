"""Rows of bytes. Items are written to a Reverb server, stored and read in this format.

A row is a numpy record that contains all data of one item. A row is sent as one array, because Reverb's client needs
time for each array. With seven named columns, writing and reading items took four times as long.

`ReverbDataset` draws batches ahead of time with endless samplers.
"""

from __future__ import annotations

import collections
import json
import time
from typing import Any

import numpy as np

from rlframe.replay.base import WAKE_INTERVAL, Dataset
from rlframe.replay.layout import TreeLayout
from rlframe.replay.reverb.connection import REPLAY, ReverbConnection, SamplerPool
from rlframe.types import AgentSpecs, Batch, Sequence, SequenceBatch, Transition, TransitionBatch, Tree, specs

_MAX_SERVER_KEYS = 1 << 17  # maximum number of stored server keys
_KEY, _PROBABILITY, _SIZE, _ROWS = 0, 1, 2, 4  # indexes of these values in a sampler's result
_SCALAR = specs.Array((), np.float32)
_CHECK_INTERVAL = 2.0  # while no batch arrives: seconds between two checks that the server is reachable
_MIN_AHEAD = 256  # items to draw ahead of time; fewer items are slower, because of round trips


class ItemRows:
    """Converts batches of an agent's items to rows, and rows to batches.

    Attributes:
        dtype: a record of `key` [3] int64 (rank, incarnation, number), `params_version` int64, and the item's leaves.
        description: JSON text that describes the contents of rows. Processes with equal descriptions are compatible.
    """

    def __init__(self, agent: AgentSpecs) -> None:
        item = agent.replay_spec.item
        self._batch = TransitionBatch if isinstance(item, Transition) else SequenceBatch
        self._trees: dict[str, TreeLayout] = {}
        columns: list[tuple[str, Any, tuple[int, ...]]] = [("key", np.int64, (3,)), ("params_version", np.int64, ())]
        for field, (spec, axes) in _fields(agent).items():
            layout = self._trees[field] = TreeLayout(field, spec)
            columns += [(leaf.name, leaf.dtype, (*axes, *leaf.shape)) for leaf in layout.leaves]
        self.dtype = np.dtype(columns, align=True)
        leaves = [[name, np.dtype(dtype).str, list(shape)] for name, dtype, shape in columns]
        self.description = json.dumps({"kind": agent.replay_spec.kind, "item": repr(item), "leaves": leaves})

    @property
    def nbytes(self) -> int:
        """Size of a row in bytes."""
        return self.dtype.itemsize

    def pack(self, batch: Batch) -> np.ndarray:
        """Return the items of `batch` as rows, [B, nbytes] uint8."""
        records = np.zeros(len(batch.keys), self.dtype)
        records["key"], records["params_version"] = batch.keys, batch.params_version
        for field, layout in self._trees.items():
            for leaf, values in zip(layout.leaves, layout.split(getattr(batch.data, field))):
                records[leaf.name] = values
        return records.view(np.uint8).reshape(len(records), self.nbytes)

    def records(self, rows: np.ndarray) -> np.ndarray:
        """Return rows as an array [B] of records. Records of padding have a negative number in their key."""
        return rows.reshape(-1).view(self.dtype)

    def unpack(self, rows: np.ndarray, probabilities: np.ndarray) -> Batch:
        """Convert rows of `pack` to a batch. `probabilities` ([B] float32) are the probabilities of the draws."""
        records = self.records(rows)
        data = {
            field: layout.build([np.ascontiguousarray(records[leaf.name]) for leaf in layout.leaves])
            for field, layout in self._trees.items()
        }
        keys, versions = np.ascontiguousarray(records["key"]), np.ascontiguousarray(records["params_version"])
        return Batch(self._batch(**data), keys, probabilities, versions)

    def padding(self, count: int) -> np.ndarray:
        """Return empty rows that fill up a block, [count, nbytes] uint8."""
        records = np.zeros(count, self.dtype)
        records["key"] = -1
        return records.view(np.uint8).reshape(count, self.nbytes)


def _fields(agent: AgentSpecs) -> dict[str, tuple[Tree, tuple[int, ...]]]:
    """Return a dict from the name of each field of a batch to (its specs, the length of its time axis or ())."""
    item, step = agent.replay_spec.item, agent.step_spec
    if isinstance(item, Sequence):
        steps, ends = (item.length,), (item.length + 1,)
        return {
            "observation": (step.observation, ends),
            "step_type": (specs.Array((), np.uint8), ends),
            "action": (step.action, steps),
            "reward": (_SCALAR, steps),
            "discount": (_SCALAR, steps),
            "extras": (step.extras, steps),
            "agent_state": (step.agent_state, ()),
        }
    return {
        "observation": (step.observation, ()),
        "action": (step.action, ()),
        "reward": (_SCALAR, ()),
        "discount": (_SCALAR, ()),
        "next_observation": (step.observation, ()),
        "extras": (step.extras, ()),
    }


class ServerKeys:
    """The keys that the server uses for the newest drawn items. Updates of priorities need these keys."""

    def __init__(self) -> None:
        self._keys: dict[tuple[int, ...], int] = {}

    def put(self, keys: np.ndarray, server_keys: list[np.ndarray]) -> None:
        """Store the server's key of each item. `keys` [B, 3] are the items' keys in this package."""
        for key, server_key in zip(map(tuple, keys.tolist()), server_keys):
            self._keys.pop(key, None)
            self._keys[key] = int(server_key)
        while len(self._keys) > _MAX_SERVER_KEYS:
            del self._keys[next(iter(self._keys))]

    def find(self, keys: np.ndarray, floor: int) -> list[int | None]:
        """Return the server key of each item in `keys` [B, 3], or None if it is unknown, or evicted (below `floor`)."""
        return [self._keys.get(key) if key[2] >= floor else None for key in map(tuple, keys.tolist())]


class DrawnItems:
    """Items that were drawn from the server, but are not in a batch yet. The oldest item is first.

    Attributes:
        size: number of items.
        received: rank -> number of items received so far. Only used if a batch has one item of each environment.
        forgotten: number of items that were dropped because they were too old.
    """

    def __init__(self, rows: ItemRows, queue: bool, by_rank: bool) -> None:
        self._rows, self._queue, self._by_rank = rows, queue, by_rank
        # Results of a sampler. A result is [key, probability, size of the table, priority, rows [block, nbytes]].
        self._samples: collections.deque[list[np.ndarray]] = collections.deque()
        self._oldest = -1
        self.received: collections.Counter[int] = collections.Counter()
        self.size = self.forgotten = 0

    def put(self, samples: list[list[np.ndarray]]) -> None:
        """Add the results of a sampler."""
        for sample in samples:
            if len(sample[_ROWS]) > 1:
                numbers = self._rows.records(sample[_ROWS])["key"][:, 2]
                if numbers[-1] < 0:  # the last rows are padding
                    sample[_ROWS] = sample[_ROWS][numbers >= 0]
            if self._by_rank:
                self.received.update(self._ranks(sample))
        self._samples.extend(samples)
        self.size += sum([len(sample[_ROWS]) for sample in samples])
        if self._oldest >= 0:
            self.forget_before(self._oldest)

    def forget_before(self, version: int) -> None:
        """Drop all items in which parameters older than `version` acted, now and in later calls of `put`."""
        self._oldest = max(self._oldest, version)
        kept = []
        for sample in self._samples:
            fresh = self._rows.records(sample[_ROWS])["params_version"] >= self._oldest
            if not fresh.all():
                sample = [*sample[:_ROWS], sample[_ROWS][fresh]]
            if len(sample[_ROWS]):
                kept.append(sample)
        before, self.size = self.size, sum(len(sample[_ROWS]) for sample in kept)
        self.forgotten += before - self.size
        self._samples = collections.deque(kept)

    def items_by_rank(self) -> dict[int, int]:
        """Return a dict from rank to the number of items of this rank."""
        counts: collections.Counter[int] = collections.Counter()
        for sample in self._samples:
            counts.update(self._ranks(sample))
        return counts

    def _ranks(self, sample: list[np.ndarray]) -> list[int]:
        """Return the rank of each item's writer."""
        return self._rows.records(sample[_ROWS])["key"][:, 0].tolist()

    def take(self, count: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Remove `count` items. Return their rows [count, nbytes] uint8, probabilities [count] and server keys."""
        samples, missing = [], count
        while missing > 0:
            samples.append(self._samples.popleft())
            missing -= len(samples[-1][_ROWS])
        if missing:  # the last block has more items than needed
            *drawn, block = samples[-1]
            samples[-1] = [*drawn, block[:missing]]
            self._samples.appendleft([*drawn, block[missing:]])
        self.size -= count
        keys, chances, sizes, _, rows = zip(*samples)
        lengths = [len(own) for own in rows]
        probabilities = np.fromiter(chances, np.float64, len(rows))
        if self._queue:  # in a queue, an item's probability is 1 / the number of items at the draw
            probabilities = 1.0 / (np.maximum(np.fromiter(sizes, np.int64, len(rows)), 1) * lengths)
        all_rows = rows[0] if len(rows) == 1 else np.concatenate(rows)
        return all_rows, np.repeat(probabilities.astype(np.float32), lengths), list(keys)


class ReverbDataset(Dataset):
    """A `Dataset` of a Reverb server.

    The buffer must have the methods `batch_size`, `missing`, `items_to_take`, `keep` and `take`.
    """

    _buffer: Any

    def __init__(
        self, buffer: Any, connection: ReverbConnection, prefetch: int, timeout: float | None, threads: int
    ) -> None:
        self._connection, self._num_samplers = connection, threads
        self._samplers: SamplerPool | None = None
        self._checked_at = time.monotonic()
        self._unreachable_since: float | None = None
        self._count, self._counted = 0, 0.0
        super().__init__(buffer, prefetch, timeout)

    def _draw(self) -> Batch | None:
        # Check first that the server is reachable, because a sampler waits for it without a deadline.
        if self._samplers is None and self._connection.try_info() is None:
            return None
        if not self._count or time.monotonic() > self._counted + WAKE_INTERVAL:
            self._count, self._counted = self._buffer.batch_size(), time.monotonic()
        count = self._count
        if not count:
            self._stop.wait(WAKE_INTERVAL)
            return None
        missing = self._buffer.missing(count)
        if self._samplers is None:
            # Draw few items of a queue ahead of time, because other readers cannot get these items. In every replay,
            # items become older if they are drawn ahead of time.
            is_queue, blocks = self._buffer.spec.kind == "queue", max(0, missing) + 1
            ahead, samplers = (blocks, 1) if is_queue else (max(blocks, _MIN_AHEAD), self._num_samplers)
            self._samplers = self._connection.samplers(REPLAY, ahead, samplers)
        if missing > 0:
            # If a batch has one item of each environment, one more item can complete the batch, because the writers of
            # the other items can lapse.
            self._collect(self._samplers, 1 if self._buffer.spec.batch_size is None else missing, missing)
        number = self._buffer.items_to_take(count)
        return self._buffer.take(number) if number else None

    def _collect(self, samplers: SamplerPool, least: int, missing: int) -> None:
        """Wait a short time until at least `least` rows are drawn, and store up to `missing` rows."""
        if self._stop.is_set():  # `close` was possibly called before the samplers existed
            return
        try:
            self._buffer.keep(samplers.draw(least, missing, WAKE_INTERVAL))
        except RuntimeError as error:
            if self._stop.is_set():
                return
            self._samplers = None
            samplers.Close()
            if not self._connection.is_connection_error(error):
                raise

    def _check(self) -> None:
        now = time.monotonic()
        if now - self._checked_at < _CHECK_INTERVAL:
            return
        self._checked_at = now
        if self._connection.try_info() is not None:
            self._unreachable_since = None
            return
        self._unreachable_since = self._unreachable_since or now
        if now - self._unreachable_since >= self._connection.timeout:
            raise self._connection.no_answer_error("sample", now - self._unreachable_since)

    def close(self) -> None:
        super().close()
        self._interrupt()  # the thread can open samplers during `super().close()`

    def _interrupt(self) -> None:
        samplers = self._samplers
        if samplers is not None:
            samplers.Close()
