"""A reader's table with the items of all segments. The reader updates the table from the segments' logs.

If rank r has an item that starts at timestep n, the item's start in the table is `r << RANK_BITS | n`. So one table can
contain the items of all segments. The table's class is also used by the in-process buffer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlframe.interprocess.processes import this_process
from rlframe.interprocess.waiting import fence
from rlframe.replay.shared_memory import block
from rlframe.replay.shared_memory.block import COUNT_BITS, COUNT_MASK, MARGIN_CHUNKS, BufferMemory
from rlframe.replay.steps import StepStore, make_table
from rlframe.replay.tables import ItemTable, QueueTable, Ring
from rlframe.replay.timeline import Index, Mask, Numbers, Timeline, ring_index
from rlframe.types import Batch, ReplaySpec, StepSpec

RANK_BITS = 43
NUMBER_MASK = (1 << RANK_BITS) - 1
_MAX_BLOCKS = 3  # the maximum number of blocks to add as blocks; with more blocks, single items are added


class SegmentsTimeline(Timeline):
    """The timesteps of all segments.

    The slots of segment r begin at r * rows. The segment uses `sizes[r]` slots.
    """

    def __init__(self, num_segments: int, rows: int):
        super().__init__(num_segments * rows, 1)
        self._rows = rows
        self._ranks = np.arange(num_segments)
        self._bases = self._ranks * rows
        self.sizes = np.full(num_segments, rows)
        self.heads = self._ranks << RANK_BITS  # the next timestep number of each segment
        self.floors = self.heads.copy()

    def index(self, numbers: Numbers, count: int) -> Index:
        if not isinstance(numbers, int):
            return self.slots_of(numbers)
        rank, number = numbers >> RANK_BITS, numbers & NUMBER_MASK
        return ring_index(number, count, int(self.sizes[rank]), base=rank * self._rows)

    def slots_of(self, numbers: np.ndarray) -> np.ndarray:
        if len(self._ranks) == 1:
            return numbers % self.sizes.item(0)
        ranks = numbers >> RANK_BITS
        return (numbers & NUMBER_MASK) % self._per_rank(self.sizes, ranks) + self._per_rank(self._bases, ranks)

    def follow(self, slots: np.ndarray, spans: Numbers) -> np.ndarray:
        if len(self._ranks) == 1:
            return (slots + spans) % self.sizes.item(0)
        ranks = slots // self._rows
        bases = self._per_rank(self._bases, ranks)
        return (slots - bases + spans) % self._per_rank(self.sizes, ranks) + bases

    def is_evicted(self, numbers: Numbers) -> Any:
        if len(self._ranks) == 1:
            return numbers < self.floors.item(0)
        return numbers < self._per_rank(self.floors, np.asarray(numbers) >> RANK_BITS)

    def holds(self, numbers: np.ndarray) -> np.ndarray:
        ranks = numbers >> RANK_BITS
        return (numbers >= self._per_rank(self.floors, ranks)) & (numbers < self._per_rank(self.heads, ranks))

    def numbers_in(self, slots: np.ndarray) -> np.ndarray:
        ranks = slots // self._rows
        heads, sizes = self._per_rank(self.heads, ranks), self._per_rank(self.sizes, ranks)
        # The newest timestep is in the slot before the head's slot. The other slots contain older timesteps.
        behind = (self._per_rank(self._bases, ranks) + (heads & NUMBER_MASK) - 1 - slots) % sizes
        return heads - 1 - behind

    def _per_rank(self, values: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        return values.take(ranks, mode="wrap")


class SegmentReader:
    """A reader's table and its positions in the segments' logs.

    Attributes:
        store: the steps of all segments.
        cursors: the cursors of each segment at the last read.
        added: number of items that the writers had added at the last read.
    """

    def __init__(self, memory: BufferMemory, spec: ReplaySpec, step_spec: StepSpec, kind: str):
        self._memory = memory
        self.timeline = SegmentsTimeline(memory.num_writers, memory.rows)
        self.table: ItemTable = make_table(kind, self.timeline, spec.priority_exponent)
        if isinstance(self.table, Ring) and memory.num_writers > 1:
            self.table.ordered = False  # eviction is in order only within one segment
        self._is_queue = kind == "queue"
        self.cursors = [block.Cursors(0, 0, 0, 0)] * memory.num_writers
        self._cursor_counts, self._floors = [-1] * memory.num_writers, [0] * memory.num_writers
        self._kept_from = [0] * memory.num_writers  # for each segment, the lowest timestep in the table
        self.added = 0
        self._pid = this_process().pid

        def whole(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            array = memory.arrays[name].view()
            array.flags.writeable = False
            return array

        self.store = StepStore(spec, step_spec, self.timeline, self.table, allocate=whole)
        self._present = whole("present", (), np.dtype(bool))

    @property
    def is_behind(self) -> bool:
        """True if writers will soon overwrite items of the table, or if a writer in this process has added steps."""
        memory = self._memory
        for header, cursors, kept, version in zip(memory.headers, memory.cursors, self._kept_from, self._cursor_counts):
            floor = header[block.FLOOR]
            is_near = floor and floor + header[block.CHUNK] > kept  # an item may be overwritten during a copy
            if is_near or (header[block.PID] == self._pid and cursors.count != version):
                return True
        return False

    def sync(self) -> None:
        """Read the new entries of all logs."""
        changed = False
        for rank, header in enumerate(self._memory.headers):
            if (
                self._memory.cursors[rank].count != self._cursor_counts[rank]
                or header[block.FLOOR] != self._floors[rank]
            ):
                self._sync(rank, header)
                changed = True
        if changed:
            # Some items were overwritten before the reader could read them. Count them as added and evicted.
            self.added = sum([cursors.added for cursors in self.cursors])
            missed = self.added - self.table.added
            self.table.added += missed
            self.table.evicted += missed
            self.table.evicted_unsampled += missed

    def _sync(self, rank: int, header: memoryview) -> None:
        if not header[block.SLOTS]:
            return
        version, cursors = self._memory.cursors[rank].count, self._memory.cursors_of(rank)
        fence()
        timeline, mark = self.timeline, rank << RANK_BITS
        timeline.sizes[rank] = header[block.SLOTS]
        firsts, counts = self._entries(rank, header, cursors.end)
        new = self._expand(mark + firsts, counts)
        fence()
        # Read the floor after the entries: timesteps below the floor may be overwritten, so their entries are invalid.
        self._floors[rank] = header[block.FLOOR]
        timeline.heads[rank] = mark + cursors.head
        self._raise_floor(rank, header)
        if isinstance(new, np.ndarray):
            self.table.append(new)
        else:
            for first, count, mask in new:
                self.table.append_block(first, timeline.index(first, count), count, mask)
        self._cursor_counts[rank], self.cursors[rank] = version, cursors

    def _entries(self, rank: int, header: memoryview, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (first timesteps, counts) of the new log entries that were not overwritten."""
        log = self._memory.logs[rank]
        low = max(self.cursors[rank].end, header[block.LOG_RESERVED] - len(log))
        log_entries = log.take(np.arange(low, end), mode="wrap")
        fence()
        log_entries = log_entries[max(0, header[block.LOG_RESERVED] - len(log) - low) :]
        return log_entries >> COUNT_BITS, log_entries & COUNT_MASK

    def _expand(self, firsts: np.ndarray, counts: np.ndarray) -> list[tuple[int, int, Mask]] | np.ndarray:
        """Return the items of log entries: a list of blocks (first number, count, mask), or an array of starts."""
        if not len(firsts):
            return []
        begins = np.concatenate([[0], (firsts[1:] != firsts[:-1] + counts[:-1]).nonzero()[0] + 1])
        if len(begins) > _MAX_BLOCKS:
            return self._starts(firsts, counts)
        blocks = []
        for first, total in zip(firsts[begins].tolist(), np.add.reduceat(counts, begins).tolist()):
            mask = self._present[self.timeline.index(first, total)]
            blocks.append((first, total, True if mask.all() else mask.copy()))
        return blocks

    def _starts(self, firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return the starts of the items of log entries."""
        starts = np.repeat(firsts - (counts.cumsum() - counts), counts) + np.arange(counts.sum())
        return starts[self._present[self.timeline.slots_of(starts)]]

    def _raise_floor(self, rank: int, header: memoryview) -> None:
        """Evict items shortly before a writer overwrites them. Then few items are overwritten during a copy.

        In a queue, evict no items early, because the writers of a queue wait.
        """
        kept = self._floors[rank]
        if kept and not self._is_queue:
            kept += MARGIN_CHUNKS * header[block.CHUNK]
        self._kept_from[rank] = kept
        timeline, floor = self.timeline, (rank << RANK_BITS) + kept
        before = int(timeline.floors[rank])
        if floor <= before:
            return
        timeline.floors[rank] = floor
        count = min(floor - before, int(timeline.sizes[rank]))
        self.table.evict(timeline.index(floor - count, count))

    def read(self, starts: np.ndarray, probabilities: np.ndarray) -> Batch:
        """Copy the items `starts`."""
        slots = self.timeline.slots_of(starts)
        data, versions = self.store.read(slots)
        return Batch(data, self.keys(starts, slots), probabilities, versions)

    def keys(self, starts: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Return the keys [B, 3] int64 of the items `starts`. `slots` are the items' first slots."""
        keys = np.zeros((len(starts), 3), np.int64)
        keys[:, 2] = starts & NUMBER_MASK
        if len(self.cursors) > 1:
            keys[:, 0] = starts >> RANK_BITS
        if max(self._memory.incarnations) > 1:
            keys[:, 1] = self.store.origin.take(slots)
        return keys

    def fetch(self, keys: np.ndarray, probabilities: np.ndarray) -> tuple[Batch, np.ndarray]:
        """Copy the items `keys` that another process has drawn. Return (batch, mask [B] bool of evicted items)."""
        for rank, header in enumerate(self._memory.headers):
            self.timeline.sizes[rank] = max(1, header[block.SLOTS])
        heads = np.array([cursors.read()[0] for cursors in self._memory.cursors])
        fence()
        starts = self.starts_of(keys)
        known = starts >= 0
        starts = np.where(known, starts, 0)
        ranks = starts >> RANK_BITS
        known &= (starts & NUMBER_MASK) < heads.take(ranks)
        batch = self.read(starts, probabilities)
        fence()
        floors = np.array([header[block.FLOOR] for header in self._memory.headers])
        return batch, ~known | ((starts & NUMBER_MASK) < floors.take(ranks))

    def take_over(self) -> None:
        """Continue a queue after its previous sampler process. Items that the previous process had drawn are lost."""
        for rank, header in enumerate(self._memory.headers):
            end, count = self._memory.read_positions[rank].read()
            if not end:
                continue
            self.timeline.sizes[rank] = header[block.SLOTS]
            firsts, counts = self._entries(rank, header, end)
            starts = self._starts((rank << RANK_BITS) + firsts, counts)
            fence()
            self._floors[rank] = header[block.FLOOR]
            # Raise the floor before the table has items. Otherwise this would evict new items in the same slots.
            self._raise_floor(rank, header)
            starts = starts[starts >= (rank << RANK_BITS) + self._floors[rank]]
            self.table.append(starts[max(0, len(starts) - count) :])
            self.cursors[rank] = self.cursors[rank]._replace(end=end)
        self.sync()

    def resume(self, starts: np.ndarray) -> None:
        """Fill the table with the items `starts` of a restored buffer. Leave out evicted items."""
        for rank, header in enumerate(self._memory.headers):
            self.cursors[rank] = self._memory.cursors_of(rank)  # skip the entries so far: `starts` has their items
            self._sync(rank, header)
        self.table.append(starts[~self.timeline.is_evicted(starts)])
        self.added = self.table.added = sum([cursors.added for cursors in self.cursors])

    def items_by_rank(self) -> dict[int, int]:
        """Return rank -> the number of its items in a queue."""
        counts = np.bincount(self.table.starts() >> RANK_BITS, minlength=len(self.cursors))
        return dict(enumerate(counts.tolist()))

    def publish_needed_items(self, unreleased: np.ndarray) -> bool:
        """Tell a queue's writers which items they must not overwrite. Return True if these items changed.

        Args:
            unreleased: starts of items that were drawn but not released.
        """
        assert isinstance(self.table, QueueTable)
        waiting = self.table.starts()
        left = [len(waiting)]
        if len(self.cursors) > 1:
            left = np.bincount(waiting >> RANK_BITS, minlength=len(self.cursors)).tolist()
        if len(unreleased):  # a writer in this process does not wait, so it can have overwritten some of these items
            waiting = np.concatenate([waiting, unreleased[~self.timeline.is_evicted(unreleased)]])
        ranks, numbers = waiting >> RANK_BITS, waiting & NUMBER_MASK
        changed = False
        for rank, header in enumerate(self._memory.headers):
            mine = numbers if len(self.cursors) == 1 else numbers[ranks == rank]
            needed, end = int(mine.min(initial=block.NO_ITEM)), self.cursors[rank].end
            changed = changed or (needed, end) != (header[block.LOWEST_NEEDED], header[block.SYNCED])
            self._memory.read_positions[rank].write(end, left[rank])
            header[block.LOWEST_NEEDED] = needed
            fence()
            header[block.SYNCED] = end
        return changed

    def torn_items(self, starts: np.ndarray) -> np.ndarray | None:
        """Return a mask [B] bool of the items that a writer may have overwritten while `read` copied them.

        Return None if no item was overwritten.
        """
        fence()
        floors = [header[block.FLOOR] for header in self._memory.headers]
        if all(floor <= kept for floor, kept in zip(floors, self._kept_from)):
            return None
        torn_items = (starts & NUMBER_MASK) < np.array(floors).take(starts >> RANK_BITS)
        return torn_items if torn_items.any() else None

    def starts_of(self, keys: np.ndarray) -> np.ndarray:
        """Return the starts of the items `keys` [B, 3]. The start is -1 if another writer has written the slot."""
        rank, incarnation, number = np.asarray(keys, np.int64).T
        known = (rank >= 0) & (rank < self._memory.num_writers) & (number >= 0) & (number <= NUMBER_MASK)
        starts = np.where(known, rank << RANK_BITS | number, 0)
        same = self.store.origin.take(self.timeline.slots_of(starts)) == incarnation
        return np.where(known & same, starts, -1)
