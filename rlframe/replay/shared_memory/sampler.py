"""The part of a shared replay buffer that samples.

One process is the sampler. It draws from its table, and writers wait for its counters. Other processes can sample
uniformly. This has no effect on the writers or the sampler.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from rlframe.errors import UsageError
from rlframe.interprocess.processes import this_process
from rlframe.interprocess.waiting import fence
from rlframe.replay.base import Draw
from rlframe.replay.rate_limiter import ItemCounts, RateLimiter, WriterState
from rlframe.replay.shared_memory import block
from rlframe.replay.shared_memory.block import BufferMemory
from rlframe.replay.shared_memory.segment_reader import RANK_BITS, SegmentReader
from rlframe.replay.tables import QueueTable
from rlframe.types import Batch, ReplaySpec, StepSpec

# Seconds between two reads of the logs. A read for every batch would take a quarter of the sampling time.
_SYNC_INTERVAL = 0.001

_NO_STARTS = np.zeros(0, np.int64)


class Sampler:
    """Draws batches from the segments of `memory`. Only one thread may call this object at a time.

    Attributes:
        is_sampler: True if this process is the sampler. False if this process only samples uniformly.
    """

    def __init__(
        self, memory: BufferMemory, spec: ReplaySpec, step_spec: StepSpec, seed: int, *, elastic_writers: bool = False
    ):
        self._memory, self._spec, self._step_spec = memory, spec, step_spec
        self._control = memory.control
        self._elastic_writers = elastic_writers
        self.is_sampler = False
        self.sampled = 0
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.reader = SegmentReader(memory, spec, step_spec, spec.kind)
        self._has_role = False
        self._min_version = -1  # a queue drops items whose policy version is lower
        self._unreleased = _NO_STARTS  # starts of a queue's items that were drawn but not released
        self._limiter = RateLimiter(spec)
        self._sync_interval, self._synced_until = (0.0 if spec.kind == "queue" else _SYNC_INTERVAL), 0.0

    def choose_role(self) -> None:
        """Make this process the sampler if there is no sampler, or if the sampler's process has exited.

        If another running process is the sampler, make this process a uniform reader.

        Raises:
            UsageError: the buffer is a queue, and another process samples it.
        """
        if self._has_role:
            return
        memory, kind = self._memory, self._spec.kind
        with memory.claims():
            other = memory.sampler
            if other != this_process() and other.is_alive:
                if kind == "queue":
                    raise UsageError(
                        f"This replay buffer is a queue, and process {other.pid} samples it. "
                        "Only one process can sample a queue."
                    )
                self.reader = SegmentReader(memory, self._spec, self._step_spec, "uniform")
                self.rng = np.random.Generator(np.random.PCG64([this_process().pid, this_process().started]))
            else:
                self._control[block.SAMPLER_PID], self._control[block.SAMPLER_STARTED] = this_process()
                self.is_sampler = True
                self._take_over()
        self._has_role = True

    def require_sampler(self) -> None:
        """Call `choose_role`, and raise `UsageError` if another process samples."""
        self.choose_role()
        if not self.is_sampler:
            pid = self._memory.sampler.pid
            raise UsageError(
                f"Process {pid} samples this replay buffer. Call this method there: this process can only read."
            )

    def _take_over(self) -> None:
        """Continue with the counters of the previous sampler process. In a queue, also continue at its position."""
        reader = self.reader = SegmentReader(self._memory, self._spec, self._step_spec, self._spec.kind)
        if isinstance(reader.table, QueueTable):
            reader.take_over()
        else:
            reader.sync()
        self._set_counts(self._control[block.SAMPLED], self._control[block.EVICTED_UNSAMPLED])
        reader.table.dropped = self._control[block.DROPPED]

    def resume(self, starts: np.ndarray, sampled: int, rng: Any, evicted_unsampled: int) -> None:
        """Continue from a saved buffer. The segments must already be filled."""
        self.reader = SegmentReader(self._memory, self._spec, self._step_spec, self._spec.kind)
        self._unreleased = _NO_STARTS
        self.reader.resume(starts)
        self._set_counts(sampled, evicted_unsampled)
        self.rng.bit_generator.state = rng

    def _set_counts(self, sampled: int, evicted_unsampled: int) -> None:
        table, self.sampled = self.reader.table, sampled
        table.added, table.evicted = self.reader.added, self.reader.added - table.size
        table.evicted_unsampled = evicted_unsampled
        if isinstance(table, QueueTable):
            table.evicted -= sampled
            table.evicted_unsampled = table.evicted

    @property
    def is_sampled_elsewhere(self) -> bool:
        """True if another process is or was the sampler. Then the counters in shared memory are valid."""
        return not self.is_sampler and self._control[block.SAMPLER_PID] != 0

    def sample(self) -> Batch | None:
        """Draw a batch. Return None while there are too few items."""
        count, forgot = self._prepare()
        batch = self._draw(count) if count else None
        if self.is_sampler:
            self.publish(batch is not None or forgot)
        return batch

    def draw(self) -> Draw | None:
        """Draw items, but do not copy them: another process reads them. Return None if there are too few items."""
        count, forgot = self._prepare()
        draw = None
        if count:
            reader = self.reader
            starts, probabilities = reader.table.draw(count, self.rng)
            draw = Draw(reader.keys(starts, reader.timeline.slots_of(starts)), probabilities)
            self.sampled += count
            if isinstance(reader.table, QueueTable):
                self._unreleased = np.concatenate([self._unreleased, starts])
        self.publish(draw is not None or forgot)
        return draw

    def release(self, keys: np.ndarray) -> None:
        """Allow a queue's writers to overwrite the drawn items `keys` [B, 3]."""
        done = np.asarray(keys, np.int64)
        left = self._unreleased[~np.isin(self._unreleased, done[:, 0] << RANK_BITS | done[:, 2])]
        if len(left) < len(self._unreleased):
            self._unreleased = left
            self.publish(True)

    def _prepare(self) -> tuple[int, bool]:
        """Read the logs if necessary, and drop old items. Return (number to draw, True if any items were dropped)."""
        now = time.monotonic()
        if now > self._synced_until or self.reader.is_behind:
            self.reader.sync()
            self._synced_until = now + self._sync_interval
        count = self._items_to_sample()
        if not count:
            self.reader.sync()
            count = self._items_to_sample()
        forgot = self.reader.store.forget_before(self._min_version) if count else 0
        if forgot:
            count = self._items_to_sample()
        return count, forgot > 0

    def forget_before(self, version: int) -> None:
        """Drop a queue's items that contain steps of a policy version below `version`, now and in the future."""
        self._min_version = max(self._min_version, version)
        self.reader.sync()
        self.publish(self.reader.store.forget_before(self._min_version) > 0)

    def _draw(self, count: int) -> Batch | None:
        reader = self.reader
        starts, probabilities = reader.table.draw(count, self.rng)
        batch = reader.read(starts, probabilities)
        torn_items = reader.torn_items(starts)
        while torn_items is not None:  # a writer overwrote these items during the copy; replace them by new draws
            rows = torn_items.nonzero()[0]
            reader.sync()
            if reader.table.size < (len(rows) if self._spec.kind == "queue" else 1):
                return None
            starts, probabilities = reader.table.draw(len(rows), self.rng)
            again = reader.read(starts, probabilities)
            for whole, part in zip(jax.tree_util.tree_leaves(batch), jax.tree_util.tree_leaves(again)):
                whole[rows] = part
            torn_items = reader.torn_items(starts)
            if torn_items is not None:
                torn_items = np.isin(np.arange(count), rows[torn_items])
        self.sampled += count
        return batch

    def _items_to_sample(self) -> int:
        """Return the size of the next batch. Return 0 if there are too few items, or if the sampler is too fast."""
        if self._memory.closed:
            return 0
        return self._limiter.items_to_sample(self._counts(), self._writers, self.reader.items_by_rank)

    def _counts(self) -> ItemCounts:
        reader = self.reader
        # The ratio limits only the sampler. Other processes pass 0, so that nothing limits them.
        return ItemCounts(reader.table.size, reader.added, self.sampled if self.is_sampler else 0)

    def _writers(self) -> dict[int, WriterState]:
        return {rank: self._writer(rank, header) for rank, header in enumerate(self._memory.headers)}

    def _writer(self, rank: int, header: memoryview) -> WriterState:
        # If a writer has not started, it counts as alive, except with elastic writers. If a writer waits until items
        # are released, it counts as active.
        is_held_up = header[block.IS_WAITING] and len(self._unreleased)
        return WriterState(
            header[block.NUM_ENVS],
            object() if is_held_up else self._memory.cursors_of(rank).steps,
            lambda: self._memory.writer(rank).is_alive if header[block.NUM_CLAIMS] else not self._elastic_writers,
        )

    def publish(self, has_drawn: bool) -> None:
        """Write the sampler's counters to shared memory, and wake the writers that wait for them."""
        control, table = self._control, self.reader.table
        if not has_drawn and not self._writers_wait():
            return
        changed = has_drawn
        if isinstance(table, QueueTable):
            changed = self.reader.publish_needed_items(self._unreleased) or has_drawn
        # Write these counters last. If the sampler dies before this, the items that it took from a queue count as
        # evicted.
        control[block.SAMPLED], control[block.SIZE] = self.sampled, table.size
        control[block.EVICTED], control[block.EVICTED_UNSAMPLED] = table.evicted, table.evicted_unsampled
        control[block.DROPPED] = table.dropped
        fence()
        # Wake the writers only after a change. Otherwise, writers and the sampler would wake each other forever.
        if changed and self._writers_wait():
            self._memory.room.wake()

    def _writers_wait(self) -> bool:
        return any(header[block.IS_WAITING] for header in self._memory.headers)

    def inserts_needed(self) -> int:
        """Return the total number of inserted items at which the next batch becomes possible."""
        return self._limiter.inserts_needed(self._counts(), self._writers)

    @property
    def size(self) -> int:
        """Number of items that can be sampled. For a queue, other processes get the number after the last batch."""
        if self._spec.kind == "queue" and self.is_sampled_elsewhere:
            return self._control[block.SIZE]
        self.reader.sync()
        return self.reader.table.size

    def stats(self, bytes_taken: int) -> dict[str, int]:
        """Return the counters. In other processes, some counters have their values from the sampler's last batch."""
        size, control, memory = self.size, self._control, self._memory
        steps = sum(cursors.read()[3] for cursors in memory.cursors)
        stats = {**self.reader.table.stats(steps, self.sampled, bytes_taken), "items": size, "added": self.reader.added}
        if self.is_sampled_elsewhere:
            stats.update(
                added=memory.added_items(),
                sampled=control[block.SAMPLED],
                evicted=control[block.EVICTED],
                evicted_unsampled=control[block.EVICTED_UNSAMPLED],
                dropped_priorities=control[block.DROPPED],
            )
        return stats

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities of the items `keys` [B, 3]."""
        self.reader.sync()
        self.reader.table.update(self.reader.starts_of(keys), priorities)
